// Operators: every operator of torch that has a CPU kernel runs on the device, when its stream gets there.
//
//   arguments ──as_meta──> Meta kernel now: shapes of the results, which are allocated
//             ──as_cpu───> CPU kernel later, over the device's bytes, by the stream
//
// What returns values to the host (item, nonzero, equal) waits for the stream. An operator without a Meta kernel runs
// at once, after its stream, and is counted by name.
#pragma once

#include "streams.h"

#include <ATen/Parallel.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/InferenceMode.h>

#include <map>
#include <string>

namespace sim {

/// The state of the thread in which kernels run, whichever thread runs them: no autograd, no autocast, no modes, and
/// the number of threads that torch.set_num_threads said, which other threads than the one that called it learn when
/// they start only.
class KernelGuard {
  public:
    KernelGuard() : was_disabled(at::impl::PythonTorchFunctionTLS::get_disabled_state()) {
        at::impl::PythonTorchFunctionTLS::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED);
        if (this_thread() != MAIN)
            at::init_num_threads();
    }
    KernelGuard(const KernelGuard &) = delete;
    KernelGuard &operator=(const KernelGuard &) = delete;
    ~KernelGuard() { at::impl::PythonTorchFunctionTLS::set_disabled_state(was_disabled); }

  private:
    c10::InferenceMode plain{false};
    c10::AutoGradMode no_grad{false};
    c10::impl::ForceDispatchKeyGuard keys{c10::DispatchKeySet(c10::DispatchKey::BackendSelect),
                                          c10::default_excluded_set |
                                              c10::autograd_dispatch_keyset_with_ADInplaceOrView};
    at::impl::TorchFunctionDisabledState was_disabled;
};

/// Makes a device the current one.
class DeviceScope {
  public:
    explicit DeviceScope(int device) : before(current_device()) { set_current_device(device); }
    DeviceScope(const DeviceScope &) = delete;
    DeviceScope &operator=(const DeviceScope &) = delete;
    ~DeviceScope() { set_current_device(before); }

  private:
    int before;
};

inline bool is_on_device(const at::Tensor &tensor) { return tensor.defined() && tensor.device().type() == DEVICE_TYPE; }
/// The bytes between a tensor's first element and the end of its last.
uint64_t span_bytes(const at::Tensor &tensor);
/// A CPU tensor over the device's bytes. Throws "illegal memory access" where the storage is too small: a released one.
at::Tensor as_cpu(const at::Tensor &tensor, const std::string &reader);
/// A CPU tensor over the same bytes, without what autograd and inference mode know of it.
at::Tensor plain_view(const at::Tensor &host);
/// A new tensor, allocated on the current stream of its device.
at::Tensor empty_on(int device, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype);

/// The boxed kernel of the device for all operators that it has no kernel of its own for.
void run_operator(const c10::OperatorHandle &op, torch::jit::Stack *stack);

/// Operators that ran at once because no Meta kernel tells their shapes, and how often.
std::map<std::string, uint64_t> undeferred();
void reset_undeferred();

} // namespace sim
