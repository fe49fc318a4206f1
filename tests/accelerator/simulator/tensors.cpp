// Tensors of the device: how they are made, viewed, resized and lent to streams; dropout and attention as the CPU
// computes them.
#include "memory.h"
#include "operators.h"

#include <ATen/EmptyTensor.h>
#include <ATen/SDPBackend.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_fused_sdp_choice_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

namespace sim {
namespace {

using at::Tensor;
using std::optional;

constexpr c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

int index_of(optional<at::Device> device) { return device && device->has_index() ? device->index() : current_device(); }

Tensor empty(at::IntArrayRef sizes, optional<at::ScalarType> dtype, optional<at::Layout> layout,
             optional<at::Device> device, optional<bool> pin_memory, optional<at::MemoryFormat> format) {
    TORCH_CHECK(c10::layout_or_default(layout) == at::kStrided, "sim has strided tensors only, not ", *layout);
    TORCH_CHECK(!c10::pinned_memory_or_default(pin_memory), "Only dense CPU tensors can be pinned");
    const DeviceScope scope(index_of(device));
    return at::detail::empty_generic(sizes, &device_allocator(), KEYS, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, optional<at::ScalarType> dtype,
                     optional<at::Layout> /*layout*/, optional<at::Device> device, optional<bool> /*pin_memory*/) {
    return empty_on(index_of(device), sizes, strides, c10::dtype_or_default(dtype));
}

const Tensor &resize(const Tensor &tensor, at::IntArrayRef sizes, optional<at::MemoryFormat> format) {
    auto *const impl = tensor.unsafeGetTensorImpl();
    impl->set_sizes_contiguous(sizes);
    const size_t needed = at::detail::computeStorageNbytesContiguous(sizes, tensor.itemsize(), tensor.storage_offset());
    if (tensor.storage().nbytes() < needed)
        at::native::resize_bytes_nocuda(tensor.storage(), needed);
    if (format && *format != at::MemoryFormat::Contiguous)
        impl->empty_tensor_restride(*format);
    return tensor;
}

Tensor &set_storage(Tensor &tensor, at::Storage storage, int64_t offset, at::IntArrayRef sizes,
                    at::IntArrayRef strides) {
    TORCH_CHECK(storage.device().type() == DEVICE_TYPE, "Attempted to set the storage of a tensor on device ",
                tensor.device(), " to a storage on different device ", storage.device());
    tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
    return tensor;
}

Tensor &set_tensor(Tensor &tensor, const Tensor &source) {
    return set_storage(tensor, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor &set_whole_storage(Tensor &tensor, at::Storage storage) {
    const auto numel = static_cast<int64_t>(storage.nbytes() / tensor.itemsize());
    return set_storage(tensor, std::move(storage), 0, {numel}, {1});
}

Tensor &set_nothing(Tensor &tensor) {
    const c10::Storage nothing(c10::Storage::use_byte_size_t(), 0, device_allocator().allocate(0), &device_allocator(),
                               true);
    return set_storage(tensor, nothing, 0, {0}, {1});
}

void record_stream(Tensor &tensor, at::Stream stream) {
    device_allocator().recordStream(tensor.storage().data_ptr(), stream);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("empty.memory_format", empty);
    m.impl("empty_strided", empty_strided);
    m.impl("as_strided", at::native::as_strided_tensorimpl);
    m.impl("view", [](const Tensor &t, at::IntArrayRef sizes) { return at::native::view(t, sizes); });
    m.impl("_reshape_alias", [](const Tensor &t, at::IntArrayRef sizes, at::IntArrayRef strides) {
        return at::native::_reshape_alias(t, sizes, strides);
    });
    m.impl("unfold", at::native::unfold);
    m.impl("view_as_real", at::native::view_as_real);
    m.impl("view_as_complex", at::native::view_as_complex);
    m.impl("resize_", resize);
    m.impl("set_.source_Storage_storage_offset", set_storage);
    m.impl("set_.source_Storage", set_whole_storage);
    m.impl("set_.source_Tensor", set_tensor);
    m.impl("set_", set_nothing);
    m.impl("record_stream", record_stream);
}

// ---- what a GPU computes by kernels of its own, and the CPU otherwise
// -------------------------------------------------

/// Dropout as the CPU computes it; torch's composite has a fused kernel for accelerators, whose rounding differs.
Tensor dropout(const Tensor &input, double p, bool is_training) {
    TORCH_CHECK(p >= 0 && p <= 1, "dropout probability has to be between 0 and 1, but got ", p);
    if (p == 0 || !is_training || input.numel() == 0)
        return input;
    if (p == 1)
        return input.mul(at::zeros({}, input.options()));
    return input.mul(at::empty_like(input, LEGACY_CONTIGUOUS_MEMORY_FORMAT).bernoulli_(1 - p).div_(1 - p));
}

/// Attention by the kernel that the CPU would choose; torch's composite asks a table that has no entry for this device.
Tensor attention(const Tensor &query, const Tensor &key, const Tensor &value, const optional<Tensor> &mask, double p,
                 bool is_causal, optional<double> scale, bool enable_gqa) {
    const int64_t choice = at::native::_fused_sdp_choice_cpp(query, key, value, mask, p, is_causal, scale, enable_gqa);
    optional<Tensor> added = mask;
    if (mask && mask->defined() && mask->scalar_type() == at::kBool)
        added = at::zeros_like(*mask, query.options())
                    .masked_fill_(mask->logical_not(), -std::numeric_limits<double>::infinity());
    if (choice == static_cast<int64_t>(at::SDPBackend::flash_attention))
        return std::get<0>(
            at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, p, is_causal, added, scale));
    return std::get<0>(at::_scaled_dot_product_attention_math(query, key, value, added, p, is_causal, std::nullopt,
                                                              scale, enable_gqa));
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("dropout", dropout);
    m.impl("scaled_dot_product_attention", attention);
}
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
    m.impl("dropout", dropout);
    m.impl("scaled_dot_product_attention", attention);
}

} // namespace
} // namespace sim
