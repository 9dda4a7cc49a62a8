// Tensors of the simulated device: made, viewed and resized here; what computes goes to Python (sim/kernels.py), which
// has the host's kernels do it on `near` tensors, aliases of the same memory on the host.
#include "memory.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace {
using namespace simgpu;
using at::Tensor;

c10::Device device_or_current(std::optional<c10::Device> device) {
  auto wanted = device.value_or(c10::Device(c10::kCUDA));
  return {c10::kCUDA, static_cast<c10::DeviceIndex>(wanted.has_index() ? wanted.index() : current_device())};
}

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard on(device_or_current(device));
  return at::detail::empty_generic(size, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard on(device_or_current(device));
  return at::detail::empty_strided_generic(size, stride, device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

void grow(const c10::Storage& storage, size_t bytes) {
  if (bytes <= storage.nbytes()) return;
  c10::DeviceGuard on(storage.device());
  auto larger = device_allocator()->allocate(bytes);
  if (storage.nbytes()) device_allocator()->copy_data(larger.get(), storage.data(), storage.nbytes());
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(larger));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

size_t bytes_of(at::IntArrayRef size, at::IntArrayRef stride, int64_t offset, size_t item) {
  return at::detail::computeStorageNbytes(size, stride, item, offset);
}

const Tensor& resize(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) {
    impl->set_sizes_contiguous(size);
    grow(self.storage(), bytes_of(self.sizes(), self.strides(), self.storage_offset(), self.itemsize()));
  }
  if (format.has_value()) impl->empty_tensor_restride(*format);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  TORCH_CHECK(source.device() == self.device(), "Attempted to set the storage of a tensor on device ", self.device(),
              " to a storage on different device ", source.device());
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source);
  if (stride.empty() && !size.empty()) {
    impl->set_sizes_contiguous(size);
    impl->set_storage_offset(offset);
  } else {
    impl->set_sizes_and_strides(size, stride, offset);
  }
  grow(source, bytes_of(self.sizes(), self.strides(), offset, self.itemsize()));
  return self;
}

Tensor& set_whole_storage(Tensor& self, at::Storage source) {
  int64_t n = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, source, 0, {n}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_nothing(Tensor& self) {
  auto none = empty({0}, self.scalar_type(), std::nullopt, self.device(), std::nullopt, std::nullopt);
  return set_storage(self, none.storage(), 0, {0}, {});
}

// ---- between a tensor of the device and its alias on the host

Tensor near_alias(const Tensor& self) {
  touch();
  TORCH_CHECK(self.is_cuda() && self.has_storage(), "only dense tensors of the simulated device have memory");
  auto storage = self.storage();
  c10::DataPtr data(near(storage.data()), new c10::Storage(storage),
                    [](void* context) { delete static_cast<c10::Storage*>(context); }, c10::Device(c10::kCPU));
  c10::Storage host(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetAllocator(c10::kCPU),
                    /*resizable=*/true);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(host), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                       self.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(self.sizes(), self.strides(), self.storage_offset());
  made._set_conj(self.is_conj());
  made._set_neg(self.is_neg());
  return made;
}

Tensor on_device(const Tensor& shape, const c10::Storage& storage) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA), shape.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(shape.sizes(), shape.strides(), shape.storage_offset());
  made._set_conj(shape.is_conj());
  made._set_neg(shape.is_neg());
  return made;
}

c10::Storage taken_over(const Tensor& host, int64_t device) {
  auto storage = host.storage();
  if (!storage.nbytes() || !storage.data()) {
    c10::DeviceGuard on(c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device)));
    return {c10::Storage::use_byte_size_t(), 0, device_allocator()->allocate(0), device_allocator(), true};
  }
  auto data = adopt(storage.mutable_data(), storage.nbytes(), static_cast<int>(device), new c10::Storage(storage),
                    [](void* holder) { delete static_cast<c10::Storage*>(holder); });
  return {c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), device_allocator(), true};
}

// A result of a kernel: a view of one of its operands, or new memory, which the device takes over.
Tensor far_result(const Tensor& result, at::TensorList near_operands, at::TensorList operands, int64_t device) {
  for (size_t i = 0; i < near_operands.size(); i++)
    if (near_operands[i].storage().unsafeGetStorageImpl() == result.storage().unsafeGetStorageImpl())
      return on_device(result, operands[i].storage());
  return on_device(result, taken_over(result, device));
}

// After a kernel that has given one of its operands another size, or more memory.
void follow(const Tensor& operand, const Tensor& near_operand) {
  auto* impl = operand.unsafeGetTensorImpl();
  if (near_operand.storage().data() != near(operand.storage().data()))
    impl->set_storage_keep_dtype(taken_over(near_operand, operand.device().index()));
  impl->set_sizes_and_strides(near_operand.sizes(), near_operand.strides(), near_operand.storage_offset());
}

// Where its elements are: number of the block, its device and stream, first and last byte in it; nothing if it has none.
std::vector<int64_t> where(const Tensor& self) {
  Block block{};
  if (!self.numel() || !self.storage().data()) return {};
  auto start = reinterpret_cast<std::uintptr_t>(near(self.storage().data()));
  if (!find_block(start, &block)) return {};
  int64_t first = self.storage_offset(), last = first;
  for (int64_t d = 0; d < self.dim(); d++) {
    auto reach = (self.size(d) - 1) * self.stride(d);
    (reach < 0 ? first : last) += reach;
  }
  auto item = static_cast<int64_t>(self.itemsize()), base = static_cast<int64_t>(start - block.start);
  return {block.id, block.device, block.stream, base + first * item, base + (last + 1) * item};
}

TORCH_LIBRARY(simgpu, m) {
  m.def("near(Tensor self) -> Tensor");
  m.def("far(Tensor result, Tensor[] near_operands, Tensor[] operands, int device) -> Tensor");
  m.def("follow(Tensor operand, Tensor near_operand) -> ()");
  m.def("where(Tensor self) -> int[]");
}
TORCH_LIBRARY_IMPL(simgpu, CompositeExplicitAutograd, m) {
  m.impl("near", near_alias);
  m.impl("far", far_result);
  m.impl("follow", follow);
  m.impl("where", where);
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("resize_", resize);
  m.impl("set_", set_nothing);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
}

} // namespace
