// The device of type CUDA on a torch that was built without: allocators, the device guard, the hooks, DDP's timer.
#include "memory.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <pthread.h>
#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace simgpu {

Python python{};

namespace {

std::mutex lock; // of everything below
std::map<std::uintptr_t, Block> blocks;
std::map<std::uintptr_t, std::uintptr_t> pinned; // start, end
std::vector<int64_t> freed;
int64_t next_block = 0;
int64_t in_use[kDevices], peak[kDevices], limit[kDevices], failures[kDevices];

int devices = 0;
bool touched = false, forked = false;
thread_local int device_now = 0;
thread_local int64_t streams_now[kDevices] = {};
thread_local std::string error;
std::atomic<int64_t> next_stream{1}, next_event{1};

struct Lease { // what the deleter of a block needs to know
  std::uintptr_t start;
  void* holder;
  void (*release)(void*);
};

size_t rounded(size_t bytes) {
  return (bytes + 511) / 512 * 512; // as torch's allocator does
}

void give_back(void* context) {
  auto* lease = static_cast<Lease*>(context);
  {
    std::lock_guard<std::mutex> held(lock);
    auto at = blocks.find(lease->start);
    if (at != blocks.end()) {
      in_use[at->second.device] -= rounded(at->second.bytes);
      if (!forked) freed.push_back(at->second.id);
      blocks.erase(at);
    }
  }
  if (lease->holder) lease->release(lease->holder);
  delete lease;
}

bool is_pinned(std::uintptr_t address) {
  std::lock_guard<std::mutex> held(lock);
  auto at = pinned.upper_bound(address);
  return at != pinned.begin() && address < (--at)->second;
}

int checked(int device) {
  TORCH_CHECK(device >= 0 && device < devices, "CUDA error: invalid device ordinal (", device, " of ", devices, ")");
  return device;
}

} // namespace

void fail_if(bool failed) {
  if (!failed) return;
  std::string said;
  said.swap(error);
  TORCH_CHECK(false, said);
}

void touch() {
  TORCH_CHECK(!forked, "CUDA error: initialization error (this process was forked from one that had used the device)");
  touched = true;
}

int current_device() {
  return device_now;
}
int64_t current_stream(int device) {
  return streams_now[device];
}

c10::DataPtr adopt(void* host, size_t bytes, int device, void* holder, void (*release)(void*)) {
  auto c = c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device));
  auto start = reinterpret_cast<std::uintptr_t>(host);
  {
    std::lock_guard<std::mutex> held(lock);
    auto size = int64_t(rounded(bytes));
    if (limit[device] && in_use[device] + size > limit[device]) {
      auto used = in_use[device];
      failures[device]++;
      if (holder) release(holder);
      TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", size, " bytes. GPU ", device,
                       " has a total capacity of ", limit[device], " bytes of which ", limit[device] - used, " are free.");
    }
    in_use[device] += size;
    peak[device] = std::max(peak[device], in_use[device]);
    blocks[start] = Block{next_block++, device, streams_now[device], start, bytes};
  }
  return {far(host), new Lease{start, holder, release}, &give_back, c};
}

bool find_block(std::uintptr_t address, Block* found) {
  std::lock_guard<std::mutex> held(lock);
  auto at = blocks.upper_bound(address);
  if (at == blocks.begin()) return false;
  --at;
  if (address >= at->second.start + std::max<size_t>(1, at->second.bytes)) return false;
  *found = at->second;
  return true;
}

namespace {

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    touch();
    if (bytes == 0) return {nullptr, c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device_now))};
    void* host = nullptr;
    TORCH_CHECK(posix_memalign(&host, 64, rounded(bytes)) == 0, "no memory on the host for a simulated device");
    return adopt(host, bytes, device_now, host, &std::free);
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(near(to), near(from), bytes);
  }
};
DeviceAllocator device_memory;

void unpin(void* host) {
  {
    std::lock_guard<std::mutex> held(lock);
    pinned.erase(reinterpret_cast<std::uintptr_t>(host));
  }
  std::free(host);
}

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    touch();
    if (bytes == 0) return {nullptr, c10::Device(c10::DeviceType::CPU)};
    void* host = nullptr;
    TORCH_CHECK(posix_memalign(&host, 4096, bytes) == 0, "no memory on the host to pin");
    auto start = reinterpret_cast<std::uintptr_t>(host);
    std::lock_guard<std::mutex> held(lock);
    pinned[start] = start + bytes;
    return {host, host, &unpin, c10::Device(c10::DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
PinnedAllocator pinned_memory;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Device device(int index) { return {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index)}; }
  static int index(c10::Device d) { return d.index() < 0 ? device_now : d.index(); }
  static c10::Stream stream(c10::Device d, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, device(checked(index(d))), id);
  }
  static int64_t number(void* event) { return reinterpret_cast<int64_t>(event); }

  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device getDevice() const override { return device(device_now); }
  void setDevice(c10::Device d) const override {
    touch();
    device_now = checked(index(d));
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override { device_now = index(d); }
  c10::Device exchangeDevice(c10::Device d) const override {
    auto before = getDevice();
    if (index(d) != device_now) setDevice(d);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(devices); }

  c10::Stream getStream(c10::Device d) const override {
    touch();
    return stream(d, streams_now[checked(index(d))]);
  }
  c10::Stream getDefaultStream(c10::Device d) const override {
    touch();
    return stream(d, 0);
  }
  c10::Stream getNewStream(c10::Device d, int) const override {
    touch();
    return stream(d, next_stream++);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto before = getStream(s.device());
    streams_now[s.device_index()] = s.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream s) const override { return reinterpret_cast<void*>(s.id()); }

  void record(void** event, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    touch();
    if (!*event) *event = reinterpret_cast<void*>(next_event++);
    fail_if(python.record && python.record(number(*event), s.device_index(), s.id()));
  }
  void block(void* event, const c10::Stream& s) const override {
    touch();
    if (event) fail_if(python.block && python.block(number(event), s.device_index(), s.id()));
  }
  bool queryEvent(void* event) const override {
    touch();
    int done = event && python.event_done ? python.event_done(number(event)) : 1;
    fail_if(done == 2);
    return done;
  }
  bool queryStream(const c10::Stream& s) const override {
    touch();
    int done = python.stream_done ? python.stream_done(s.device_index(), s.id()) : 1;
    fail_if(done == 2);
    return done;
  }
  void synchronizeEvent(void* event) const override {
    touch();
    if (event) fail_if(python.wait_event && python.wait_event(number(event)));
  }
  void synchronizeStream(const c10::Stream& s) const override {
    touch();
    fail_if(python.wait_stream && python.wait_stream(s.device_index(), s.id()));
  }
  void synchronizeDevice(const c10::DeviceIndex d) const override {
    touch();
    fail_if(python.wait_device && python.wait_device(d < 0 ? device_now : d));
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    double ms = python.elapsed_ms ? python.elapsed_ms(number(first), number(second)) : 0.0;
    fail_if(ms < 0);
    return ms;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const override {
    Block block{};
    if (data.get() && find_block(reinterpret_cast<std::uintptr_t>(near(data.get())), &block))
      fail_if(python.keep && python.keep(block.id, s.device_index(), s.id()));
  }
};
Guard guard;
c10::impl::DeviceGuardImplRegistrar guard_registrar(c10::DeviceType::CUDA, &guard);

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override { touch(); }
  bool hasCUDA() const override { return devices > 0; }
  bool isAvailable() const override { return devices > 0; }
  bool isBuilt() const override { return devices > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return touched; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(devices); }
  int getNumGPUs() const override { return devices; }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(device_now); }
  c10::DeviceIndex current_device() const override { return getCurrentDevice(); }
  void setCurrentDevice(c10::DeviceIndex d) const override { guard.setDevice(Guard::device(d)); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override {
    return guard.exchangeDevice(Guard::device(d)).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override { return exchangeDevice(d); }
  long versionCuDNN() const override { return 0; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(reinterpret_cast<std::uintptr_t>(data)); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  at::Device getDeviceFromPtr(void* data) const override {
    Block block{};
    TORCH_CHECK(find_block(reinterpret_cast<std::uintptr_t>(near(data)), &block), "not a pointer of a device");
    return Guard::device(block.device);
  }
  void deviceSynchronize(c10::DeviceIndex d) const override { guard.synchronizeDevice(d); }
};

struct At_import {
  At_import() {
    c10::SetAllocator(c10::DeviceType::CUDA, &device_memory);
    at::setHostAllocator(c10::DeviceType::CUDA, &pinned_memory);
    pthread_atfork(nullptr, nullptr, [] { forked = forked || touched; });
  }
} at_import;

} // namespace

c10::Allocator* device_allocator() {
  return &device_memory;
}

} // namespace simgpu

namespace at {
using CUDAHooks = simgpu::Hooks; // the name by which torch looks for them
REGISTER_CUDA_HOOKS(CUDAHooks)
} // namespace at

namespace c10d {
namespace {
struct SimTimer final : Timer { // of DDP's reducer: times of the host
  explicit SimTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    int64_t from = getTimeRef(start), to = getTimeRef(end);
    if (from == kUnsetTime || to == kUnsetTime || to < from) return std::nullopt;
    return to - from;
  }
};
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, SimTimer)
} // namespace
} // namespace c10d

// What sim/native.py calls.
extern "C" {
using namespace simgpu;

void simgpu_python(const Python* functions) { python = *functions; }
void simgpu_error(const char* text) { error = text; }
void simgpu_devices(int count) { devices = count; }
int simgpu_forked() { return forked; }
void simgpu_touched() { touched = true; }
void simgpu_limit(int device, int64_t bytes) { limit[device] = bytes; }
int64_t simgpu_in_use(int device) { return in_use[device]; }
int64_t simgpu_peak(int device) { return peak[device]; }
int64_t simgpu_failures(int device) { return failures[device]; }
void simgpu_forget_peak(int device) {
  std::lock_guard<std::mutex> held(lock);
  peak[device] = in_use[device];
}
int simgpu_freed(int64_t* ids, int most) {
  std::lock_guard<std::mutex> held(lock);
  int n = 0;
  for (; n < most && n < int(freed.size()); n++) ids[n] = freed[n];
  freed.erase(freed.begin(), freed.begin() + n);
  return n;
}
int simgpu_pin(std::uintptr_t start, size_t bytes) {
  std::lock_guard<std::mutex> held(lock);
  return pinned.emplace(start, start + bytes).second ? 0 : 712; // cudaErrorHostMemoryAlreadyRegistered
}
int simgpu_is_pinned(std::uintptr_t address) { return is_pinned(address); }
int simgpu_unpin(std::uintptr_t start) {
  std::lock_guard<std::mutex> held(lock);
  return pinned.erase(start) ? 0 : 713; // cudaErrorHostMemoryNotRegistered
}
}
