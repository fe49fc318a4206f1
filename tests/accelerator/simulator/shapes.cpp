#include "shapes.h"

#include "operators.h"

#include <ATen/ops/empty_strided.h>

#include <mutex>
#include <string>
#include <unordered_map>

namespace sim {
namespace {

constexpr size_t MAX_KNOWN = 20'000;

std::mutex known_lock;
auto &known = *new std::unordered_map<std::string, std::shared_ptr<const Shapes>>;

/// All that a Meta kernel may look at, as bytes. Not valid if an argument is of a type that it does not know.
class Key {
  public:
    Key(const c10::OperatorHandle &op, const Values &arguments) {
        add(&op.schema());
        add(at::get_default_dtype());
        for (const c10::IValue &value : arguments)
            add_value(value);
    }

    bool is_valid() const { return is_known; }
    const std::string &text() const { return bytes; }

  private:
    std::string bytes;
    std::vector<at::TensorImpl *> seen; // a tensor that comes again is said by its number
    bool is_known = true;

    template <class Plain> void add(const Plain &plain) {
        static_assert(std::is_trivially_copyable_v<Plain>);
        bytes.append(reinterpret_cast<const char *>(&plain), sizeof plain);
    }

    template <class List> void add_list(char tag, const List &list) {
        bytes.push_back(tag);
        add(list.size());
        for (const auto one : list)
            add(one);
    }

    void add_tensor(const at::Tensor &tensor) {
        at::TensorImpl *const impl = tensor.unsafeGetTensorImpl();
        for (size_t number = 0; number < seen.size(); number++)
            if (seen[number] == impl) {
                bytes.push_back('=');
                return add(number);
            }
        seen.push_back(impl);
        bytes.push_back(impl->is_wrapped_number() ? 'w' : 't');
        add(tensor.scalar_type());
        add_list('s', tensor.sizes());
        add_list('s', tensor.strides());
    }

    void add_value(const c10::IValue &value) {
        if (value.isTensor() && value.toTensor().defined())
            return add_tensor(value.toTensor());
        if (value.isTensorList() || value.isOptionalTensorList()) {
            bytes.push_back('[');
            for_each_tensor(value, [this](const at::Tensor &tensor) { add_tensor(tensor); });
            if (value.isOptionalTensorList()) // which of them are missing
                for (const std::optional<at::Tensor> one : value.toOptionalTensorList())
                    add(one && one->defined());
            bytes.push_back(']');
        } else if (value.isNone() || value.isTensor() || value.isGenerator() || value.isDevice()) {
            bytes.push_back('n');
        } else if (value.isInt()) {
            bytes.push_back('i');
            add(value.toInt());
        } else if (value.isDouble()) {
            bytes.push_back('d');
            add(value.toDouble());
        } else if (value.isBool()) {
            bytes.push_back('b');
            add(value.toBool());
        } else if (value.isIntList()) {
            add_list('I', value.toIntVector());
        } else if (value.isDoubleList()) {
            add_list('D', value.toDoubleVector());
        } else if (value.isBoolList()) {
            bytes.push_back('B');
            for (const bool one : value.toBoolList())
                add(one);
        } else if (value.isString()) {
            bytes += "\"" + value.toStringRef() + "\"";
        } else {
            is_known = false;
        }
    }
};

/// A number that Python wrote stays one: Meta kernels in Python get it as a number.
at::Tensor as_meta(const at::Tensor &tensor) {
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number() && tensor.device().is_cpu())
        return tensor.clone();
    return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).requires_grad(false));
}

std::shared_ptr<const Shapes> ask(const c10::OperatorHandle &op, const Values &arguments) {
    const KernelGuard guard;
    Substitutes metas(arguments, at::kMeta, as_meta);
    for (c10::IValue &value : metas.arguments)
        if (value.isGenerator())
            value = c10::IValue();
    auto found = std::make_shared<Shapes>();
    found->stand_ins = metas.substitutes();
    found->results = call_kernel(op, c10::DispatchKey::Meta, metas.arguments);
    return found;
}

} // namespace

std::shared_ptr<const Shapes> shapes_of(const c10::OperatorHandle &op, const Values &arguments) {
    const Key key(op, arguments);
    if (!key.is_valid())
        return ask(op, arguments);
    {
        std::lock_guard lock(known_lock);
        if (const auto found = known.find(key.text()); found != known.end())
            return found->second;
    }
    auto found = ask(op, arguments);
    std::lock_guard lock(known_lock);
    if (known.size() >= MAX_KNOWN)
        known.clear();
    return known[key.text()] = found;
}

} // namespace sim
