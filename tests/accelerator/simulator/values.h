// Values: the boxed arguments and results of an operator, and the tensors inside them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <utility>
#include <vector>

namespace sim {

using Values = std::vector<c10::IValue>;

/// Calls `act` with every tensor in a value that is defined.
template <class Act> void for_each_tensor(const c10::IValue &value, Act act) {
    if (value.isTensor() && value.toTensor().defined())
        act(value.toTensor());
    else if (value.isTensorList())
        for (const at::Tensor &one : value.toTensorList())
            act(one);
    else if (value.isOptionalTensorList())
        for (const std::optional<at::Tensor> one : value.toOptionalTensorList())
            if (one && one->defined())
                act(*one);
}

/// A value with each tensor replaced.
template <class Replace> c10::IValue with_tensors(const c10::IValue &value, Replace replace) {
    if (value.isTensor() && value.toTensor().defined())
        return replace(value.toTensor());
    if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor &one : value.toTensorList())
            list.push_back(replace(one));
        return list;
    }
    if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> list;
        for (const std::optional<at::Tensor> one : value.toOptionalTensorList())
            list.push_back(one && one->defined() ? std::optional<at::Tensor>(replace(*one)) : one);
        return list;
    }
    return value;
}

/// Arguments in another form, and which tensor stands for which.
struct Substitutes {
    Values arguments;
    std::vector<std::pair<at::Tensor, at::Tensor>> pairs; // (the given one, its substitute)

    template <class Make> Substitutes(const Values &given, c10::Device device, Make make) {
        for (const c10::IValue &value : given) {
            if (value.isDevice()) {
                arguments.push_back(device);
                continue;
            }
            arguments.push_back(with_tensors(value, [&](const at::Tensor &tensor) {
                for (const auto &[known, substitute] : pairs)
                    if (known.is_same(tensor))
                        return substitute;
                at::Tensor substitute = make(tensor);
                if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
                    substitute.unsafeGetTensorImpl()->set_wrapped_number(true);
                pairs.emplace_back(tensor, substitute);
                return substitute;
            }));
        }
    }

    std::vector<at::Tensor> substitutes() const {
        std::vector<at::Tensor> found;
        for (const auto &pair : pairs)
            found.push_back(pair.second);
        return found;
    }
};

/// Calls the kernel that an operator has for a key.
inline Values call_kernel(const c10::OperatorHandle &op, c10::DispatchKey key, const Values &arguments) {
    torch::jit::Stack stack(arguments.begin(), arguments.end());
    op.redispatchBoxed(c10::DispatchKeySet(key), &stack);
    return stack;
}

} // namespace sim
