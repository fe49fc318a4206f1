// Who waits, as CUDA documents it (API synchronization behavior, and at::native::copy_ of CUDA):
//
//                                     non_blocking=True              non_blocking=False
//   host -> device, page-locked       nothing; host bytes are read   the host, until it is done
//                                     when the stream gets there
//   host -> device, pageable          the host, for the stream; the  the same, and until it is done
//                                     bytes are staged before return
//   device -> host, page-locked       nothing; bytes arrive later    the host, until it is done
//   device -> host, pageable          the host, until it is done     the same
//   device -> other device            nothing; each stream waits for the other
//
// A host tensor of another layout or dtype than the device's is staged in pageable memory.
#include "copies.h"

#include "host.h"
#include "memory.h"
#include "operators.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <atomic>
#include <memory>

namespace sim {
namespace {

using at::Tensor;

std::atomic<uint64_t> to_device_bytes, to_host_bytes, between_devices_bytes, num_pageable;

/// A host tensor that a pending copy uses. The use ends before the tensor is let go.
struct Held {
    Tensor host;
    HostUse use;

    explicit Held(const Tensor &tensor) : host(tensor), use(tensor.data_ptr(), span_bytes(tensor)) {}
};

std::function<void()> copying(const Tensor &to, const Tensor &from) {
    return [=] {
        const KernelGuard guard;
        to.copy_(from);
    };
}

/// Whether the host's bytes move as they are. Else the host converts or gathers them in pageable memory.
bool is_direct(const Tensor &host, const Tensor &device) {
    const bool is_same_layout = host.strides() == device.strides() && host.is_non_overlapping_and_dense();
    return host.scalar_type() == device.scalar_type() && host.sizes() == device.sizes() &&
           host.is_conj() == device.is_conj() && host.is_neg() == device.is_neg() &&
           (host.is_contiguous() || is_same_layout);
}

void copy_to_device(const Tensor &host, const Tensor &device, bool is_blocking) {
    const c10::Stream stream = current_stream(device.device().index());
    const Tensor to = as_cpu(device, "copy_");
    const Label label{"copy to device", Lane::TO_DEVICE, device.nbytes()};
    to_device_bytes += device.nbytes();
    Mark end;
    if (is_direct(host, device) && is_registered(host.data_ptr(), span_bytes(host))) {
        const auto held = std::make_shared<Held>(host);
        const auto copy = copying(to, plain_view(host));
        end = issue(stream, {[held, copy] { copy(); }, {}, {}}, label);
    } else {
        num_pageable++;
        if (!is_blocking)
            wait_on_host(mark_of(stream), "pageable copy to device");
        end = issue(stream, {copying(to, plain_view(host).clone()), {}, {}}, label);
    }
    if (is_blocking)
        wait_on_host(end, "copy to device");
}

void copy_to_host(const Tensor &device, const Tensor &host, bool is_blocking) {
    const c10::Stream stream = current_stream(device.device().index());
    const auto copy = copying(plain_view(host), as_cpu(device, "copy_"));
    const auto held = std::make_shared<Held>(host);
    const bool is_pinned = is_direct(host, device) && is_registered(host.data_ptr(), span_bytes(host));
    to_host_bytes += device.nbytes();
    num_pageable += !is_pinned;
    const Mark end =
        issue(stream, {[held, copy] { copy(); }, {}, {}}, {"copy to host", Lane::TO_HOST, device.nbytes()});
    if (is_blocking || !is_pinned)
        wait_on_host(end, is_pinned ? "copy to host" : "pageable copy to host");
}

void copy_on_devices(const Tensor &from, const Tensor &to) {
    const c10::Stream source = current_stream(from.device().index()), target = current_stream(to.device().index());
    const auto copy = copying(as_cpu(to, "copy_"), as_cpu(from, "copy_"));
    if (from.device() == to.device()) {
        issue(target, {copy, {}, {}}, {"aten::copy_", Lane::COMPUTE, from.nbytes() + to.nbytes()});
        return;
    }
    between_devices_bytes += to.nbytes();
    make_wait(source, mark_of(target));
    make_wait(target, issue(source, {copy, {}, {}}, {"copy between devices", Lane::BETWEEN_DEVICES, to.nbytes()}));
}

Tensor copy_from(const Tensor &from, const Tensor &to, bool non_blocking) {
    if (to.numel() == 0)
        return to;
    if (is_on_device(from) && is_on_device(to))
        copy_on_devices(from, to);
    else if (is_on_device(to))
        copy_to_device(from, to, !non_blocking);
    else
        copy_to_host(from, to, !non_blocking);
    return to;
}

Tensor copy_from_and_resize(const Tensor &from, const Tensor &to) {
    to.resize_(from.sizes());
    return copy_from(from, to, false);
}

/// item(): the value, after the stream.
at::Scalar read_number(const Tensor &tensor) {
    const Tensor number = at::empty(tensor.sizes(), tensor.options().device(at::kCPU).requires_grad(false));
    const c10::Stream stream = current_stream(tensor.device().index());
    const auto copy = copying(number, as_cpu(tensor, "item"));
    wait_on_host(issue(stream, {copy, {}, {}}, {"item", Lane::TO_HOST, tensor.nbytes()}), "item");
    return number.item();
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("_copy_from", copy_from);
    m.impl("_copy_from_and_resize", copy_from_and_resize);
    m.impl("_local_scalar_dense", read_number);
}

// The copies themselves resolve lazy conjugates and negatives.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

} // namespace

CopyCounts copy_counts() { return {to_device_bytes, to_host_bytes, between_devices_bytes, num_pageable}; }

void reset_copy_counts() { to_device_bytes = to_host_bytes = between_devices_bytes = num_pageable = 0; }

} // namespace sim
