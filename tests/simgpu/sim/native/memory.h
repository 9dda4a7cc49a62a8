// What the parts of the simulated device share: blocks of memory, streams and the functions of Python that keep order.
#pragma once
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <cstdint>

namespace simgpu {

constexpr int kDevices = 16;
// Device memory is the host's at another address: whoever uses that address on the host ends with a segmentation fault.
constexpr std::uintptr_t kFar = std::uintptr_t(1) << 60;

struct Block {
  int64_t id;
  int device;
  int64_t stream; // current when it was allocated
  std::uintptr_t start; // on the host
  size_t bytes;
};

// Functions of Python; each returns 0, or 1 if `simgpu_error` has been told what is wrong.
struct Python {
  int (*record)(int64_t event, int device, int64_t stream);
  int (*block)(int64_t event, int device, int64_t stream);
  int (*event_done)(int64_t event); // 0 no, 1 yes, 2 error
  int (*stream_done)(int device, int64_t stream); // 0 no, 1 yes, 2 error
  int (*wait_event)(int64_t event);
  int (*wait_stream)(int device, int64_t stream);
  int (*wait_device)(int device);
  double (*elapsed_ms)(int64_t first, int64_t second); // negative: error
  int (*keep)(int64_t block, int device, int64_t stream);
};

extern Python python;
void fail_if(bool failed); // throws what `simgpu_error` was told

int current_device();
int64_t current_stream(int device);
void touch(); // throws in a process that was forked from one that has used a device

c10::Allocator* device_allocator();
// Takes memory of the host for device memory; `holder` is kept until it is given back.
c10::DataPtr adopt(void* host, size_t bytes, int device, void* holder, void (*release)(void*));
bool find_block(std::uintptr_t address_on_host, Block* found);

inline void* near(const void* p) {
  return p ? reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(p) - kFar) : nullptr;
}
inline void* far(const void* p) {
  return p ? reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(p) + kFar) : nullptr;
}

} // namespace simgpu
