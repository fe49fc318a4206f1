#include "operators.h"

#include "flops.h"
#include "memory.h"
#include "random.h"
#include "recording.h"
#include "shapes.h"
#include "values.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <set>

namespace sim {
namespace {

using at::Tensor;
using c10::IValue;

std::mutex undeferred_lock;
auto &undeferred_counts = *new std::map<std::string, uint64_t>;

// ---- one call of an operator ----------------------------------------------------------------------------------------

/// Operators that fill a tensor with random numbers and read nothing of it.
bool is_random_fill(const std::string &name) {
    static const std::set<std::string> names{"aten::normal_", "aten::uniform_",     "aten::bernoulli_",
                                             "aten::random_", "aten::exponential_", "aten::geometric_",
                                             "aten::cauchy_", "aten::log_normal_",  "aten::randperm"};
    return names.count(name) > 0;
}

bool is_one_of(const std::vector<Tensor> &tensors, const Tensor &tensor) {
    return std::any_of(tensors.begin(), tensors.end(), [&](const Tensor &one) { return one.is_same(tensor); });
}

class Call {
  public:
    Call(const c10::OperatorHandle &operation, torch::jit::Stack *stack)
        : op(operation), name(op.schema().name()), given(stack->end() - op.schema().arguments().size(), stack->end()),
          device(find_device()), scope(device), stream(current_stream(device)) {
        torch::jit::drop(*stack, given.size());
        move_indices();
        check_devices();
        lend_generator();
    }

    Values run() {
        if (is_random && is_random_fill(name) && fill_at_random())
            return results;
        if (needs_values() || has_other_shapes() || !find_results())
            run_now();
        else
            defer();
        return results;
    }

  private:
    const c10::OperatorHandle op;
    const std::string name;
    Values given;
    const int device;
    const DeviceScope scope;
    const c10::Stream stream;
    Values results;
    bool is_random = false;

    int find_device() const {
        std::optional<int> found;
        for (const IValue &value : given) {
            for_each_tensor(value, [&](const Tensor &tensor) {
                if (!found && is_on_device(tensor))
                    found = tensor.device().index();
            });
            if (!found && value.isDevice() && value.toDevice().has_index())
                found = value.toDevice().index();
        }
        return found.value_or(current_device());
    }

    /// Indices may be on the CPU, as CUDA allows: they are copied to the device.
    void move_indices() {
        if (name != "aten::index" && name != "aten::index_put" && name != "aten::_index_put_impl_")
            return;
        for (IValue &value : given)
            if (value.isOptionalTensorList())
                value = with_tensors(value, [this](const Tensor &index) {
                    return is_on_device(index) ? index : index.to(device_of(device));
                });
    }

    /// Numbers may be on the CPU if they are only read.
    void check_devices() const {
        for (size_t at = 0; at < given.size(); at++) {
            const auto *const alias = op.schema().arguments()[at].alias_info();
            const bool is_written = alias && alias->isWrite();
            for_each_tensor(given[at], [&](const Tensor &tensor) {
                const bool is_number = tensor.device().is_cpu() && tensor.dim() == 0 && !is_written;
                TORCH_CHECK(tensor.device() == device_of(device) || is_number,
                            "Expected all tensors to be on the same device, but found at least two devices, ",
                            device_of(device), " and ", tensor.device(), "! (", name, ")");
            });
        }
    }

    /// Gives the kernel a CPU generator in place of the device's. The draw from the device's is made now.
    void lend_generator() {
        for (size_t at = 0; at < given.size(); at++) {
            const auto &type = op.schema().arguments()[at].type();
            if (type->str().find("Generator") == std::string::npos)
                continue;
            is_random = true;
            const at::Generator &mine = given[at].isGenerator() ? given[at].toGenerator() : default_generator(device);
            at::Generator drawing = cpu_generator_of(mine, device);
            if (!is_random_fill(name)) { // how much it draws is only known when it runs: it gets a sequence of its own
                std::lock_guard lock(drawing.mutex());
                drawing = at::detail::createCPUGenerator(drawing.get<at::CPUGeneratorImpl>()->random64());
            }
            given[at] = drawing;
        }
    }

    /// Draws the values now, and has the stream copy them.
    bool fill_at_random() {
        const KernelGuard guard;
        std::optional<Tensor> target;
        const Substitutes drawn(given, at::kCPU, [&](const Tensor &tensor) {
            target = tensor;
            return at::empty_strided(tensor.sizes(), tensor.strides(),
                                     tensor.options().device(at::kCPU).requires_grad(false));
        });
        if (drawn.pairs.size() != 1)
            return false; // bernoulli_ with a tensor of probabilities
        call_kernel(op, c10::DispatchKey::CPU, drawn.arguments);
        const Tensor values = drawn.pairs[0].second;
        if (target->sizes() != values.sizes())
            target->resize_(values.sizes());
        const Tensor place = as_cpu(*target, name);
        results = {*target};
        issue(stream,
              {[=] {
                   const KernelGuard inner;
                   place.copy_(values);
               },
               {},
               {}},
              label());
        return true;
    }

    /// Operators whose Meta kernels promise other shapes than the CPU's kernels return.
    bool has_other_shapes() const {
        return name == "aten::_embedding_bag" || name == "aten::_embedding_bag_forward_only";
    }

    /// Whether the host gets what the kernel computes.
    bool needs_values() const {
        bool gives_tensors = true;
        for (const auto &returned : op.schema().returns())
            gives_tensors &= returned.type()->str().find("Tensor") == 0;
        if (name == "aten::index") { // by masks only
            bool has_mask = false;
            for_each_tensor(given[1], [&](const Tensor &index) {
                has_mask |= index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
            });
            return has_mask;
        }
        return !gives_tensors || op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
    }

    /// Allocates the results by the Meta kernel. False: it has none, or the arguments are wrong, which the CPU's kernel
    /// will say.
    bool find_results() {
        try {
            const auto shapes = shapes_of(op, given);
            const std::vector<Tensor> mine = different_tensors();
            for (size_t at = 0; at < mine.size(); at++)
                if (mine[at].sizes() != shapes->stand_ins[at].sizes()) // an `out` that the operator resizes
                    mine[at].resize_(shapes->stand_ins[at].sizes());
            const std::vector<std::optional<at::ScalarType>> dtypes = dtypes_on_cpu();
            for (size_t at = 0; at < shapes->results.size(); at++)
                results.push_back(with_tensors(shapes->results[at], [&](const Tensor &meta) {
                    const auto dtype = at < dtypes.size() && dtypes[at] ? *dtypes[at] : meta.scalar_type();
                    return result_like(meta, mine, shapes->stand_ins, dtype);
                }));
            return true;
        } catch (const c10::NotImplementedError &) {
            results.clear();
            return returns_arguments();
        } catch (const c10::OutOfMemoryError &) {
            throw;
        } catch (const std::exception &) {
            results.clear();
            return false;
        }
    }

    /// An operator that only changes its arguments needs no shapes. Sets `results`.
    bool returns_arguments() {
        if (name.back() != '_')
            return false;
        if (!op.schema().returns().empty())
            results = {given.at(0)};
        return op.schema().returns().size() <= 1;
    }

    /// The statistics of norms have a dtype on the CPU that Meta kernels do not know: they promise a GPU's.
    std::vector<std::optional<at::ScalarType>> dtypes_on_cpu() const {
        static const std::map<std::string, size_t> weights{
            // by operator, which argument
            {"aten::native_layer_norm", 2},        {"aten::_fused_rms_norm", 2},
            {"aten::native_group_norm", 1},        {"aten::native_batch_norm", 1},
            {"aten::_native_batch_norm_legit", 1}, {"aten::_batch_norm_with_update", 1}};
        const auto found = weights.find(name);
        if (found == weights.end())
            return {};
        const at::ScalarType input = given[0].toTensor().scalar_type();
        const IValue &weight = given[found->second];
        const bool is_mixed =
            weight.isTensor() && weight.toTensor().defined() && weight.toTensor().scalar_type() != input;
        const at::ScalarType statistics = is_mixed ? at::kFloat : input;
        return {{}, statistics, statistics};
    }

    std::vector<Tensor> different_tensors() const {
        std::vector<Tensor> found;
        for (const IValue &value : given)
            for_each_tensor(value, [&](const Tensor &tensor) {
                if (!is_one_of(found, tensor))
                    found.push_back(tensor);
            });
        return found;
    }

    /// A meta result as ours: an argument, a view of one, or new.
    Tensor result_like(const Tensor &meta, const std::vector<Tensor> &mine, const std::vector<Tensor> &stand_ins,
                       at::ScalarType dtype) const {
        for (size_t at = 0; at < mine.size(); at++)
            if (stand_ins[at].is_same(meta))
                return mine[at];
        for (size_t at = 0; at < mine.size(); at++)
            if (is_on_device(mine[at]) && stand_ins[at].storage().is_alias_of(meta.storage()))
                return view_like(meta, mine[at]);
        return empty_on(device, meta.sizes(), meta.strides(), dtype);
    }

    static Tensor view_like(const Tensor &meta, const Tensor &base) {
        Tensor view = at::native::as_strided_tensorimpl(base, base.sizes(), base.strides(), base.storage_offset());
        auto *const impl = view.unsafeGetTensorImpl();
        impl->set_storage_and_dtype(base.storage(), meta.dtype());
        impl->set_sizes_and_strides(meta.sizes(), meta.strides(), base.storage_offset() + meta.storage_offset());
        return view;
    }

    /// CPU tensors over the device's bytes; a number on the CPU is taken as it is now.
    Substitutes over_shadow() const {
        return {given, at::kCPU, [this](const Tensor &tensor) {
                    return is_on_device(tensor) ? as_cpu(tensor, name) : plain_view(tensor).clone();
                }};
    }

    void defer() {
        const KernelGuard guard;
        const Substitutes cpu = over_shadow();
        Values places;
        for (const IValue &result : results)
            places.push_back(with_tensors(
                result, [this](const Tensor &tensor) { return is_on_device(tensor) ? as_cpu(tensor, name) : tensor; }));
        // The operation keeps no tensor of the device alive: what it uses may be freed, in stream order.
        issue(stream,
              {[op = op, name = name, arguments = cpu.arguments, substitutes = cpu.substitutes(), places] {
                   const KernelGuard inner;
                   const Values found = call_kernel(op, c10::DispatchKey::CPU, arguments);
                   for (size_t at = 0; at < found.size() && at < places.size(); at++)
                       put(name, places[at], found[at], substitutes);
               },
               {},
               {}},
              label());
        if (schedule() == Schedule::AT_ONCE)
            throw_failure();
    }

    /// Copies what a kernel returned to where it belongs, unless it is there.
    static void put(const std::string &name, const IValue &place, const IValue &found,
                    const std::vector<Tensor> &in_place) {
        std::vector<Tensor> places, values;
        for_each_tensor(place, [&](const Tensor &tensor) { places.push_back(tensor); });
        for_each_tensor(found, [&](const Tensor &tensor) { values.push_back(tensor); });
        TORCH_CHECK(places.size() == values.size(), "sim: ", name, " returned ", values.size(), " tensors, not ",
                    places.size());
        for (size_t at = 0; at < values.size(); at++) {
            const Tensor &value = values[at];
            if (is_one_of(in_place, value) || value.numel() == 0) // some kernels leave out what nobody will read
                continue;
            TORCH_CHECK(places[at].sizes() == value.sizes() && places[at].dtype() == value.dtype(), "sim: ", name,
                        " returned ", value.sizes(), " of ", value.dtype(), ", its Meta kernel promised ",
                        places[at].sizes(), " of ", places[at].dtype());
            places[at].copy_(value);
        }
    }

    /// Runs the kernel and waits for it, since its values or its shapes are needed now.
    void run_now() {
        std::optional<Substitutes> cpu;
        const auto found = std::make_shared<Values>();
        {
            const KernelGuard guard;
            cpu.emplace(over_shadow());
        }
        const Mark end = issue(stream,
                               {[op = op, arguments = cpu->arguments, found] {
                                    const KernelGuard inner;
                                    *found = call_kernel(op, c10::DispatchKey::CPU, arguments);
                                },
                                {},
                                {}},
                               label());
        if (needs_values()) {
            wait_on_host(end, name);
        } else {
            run_until(end);
            throw_failure();
            std::lock_guard lock(undeferred_lock);
            undeferred_counts[name]++;
        }
        for (const auto &[mine, value] : cpu->pairs)
            if (is_on_device(mine) && mine.sizes() != value.sizes()) { // an `out` that was resized
                mine.resize_(value.sizes());
                copy_later(mine, value);
            }
        for (const IValue &value : *found)
            results.push_back(with_tensors(value, [&](const Tensor &tensor) {
                for (const auto &[mine, substitute] : cpu->pairs)
                    if (substitute.is_same(tensor))
                        return mine;
                Tensor mine = empty_on(device, tensor.sizes(), tensor.strides(), tensor.scalar_type());
                copy_later(mine, tensor);
                return mine;
            }));
    }

    void copy_later(const Tensor &mine, const Tensor &value) const {
        const Tensor place = as_cpu(mine, name);
        issue(stream, {[=] {
                           const KernelGuard inner;
                           place.copy_(value);
                       },
                       {},
                       {}});
    }

    Label label() const {
        if (!is_recording())
            return {"", Lane::COMPUTE};
        uint64_t bytes = 0;
        const std::vector<Tensor> used = different_tensors();
        for (const Tensor &tensor : used)
            bytes += tensor.nbytes();
        for (const IValue &value : results)
            for_each_tensor(value, [&](const Tensor &tensor) {
                if (!is_one_of(used, tensor) || name.back() == '_') // new, or read and written
                    bytes += tensor.nbytes();
            });
        return {name, Lane::COMPUTE, bytes, flops_of(name, given, results)};
    }
};

} // namespace

uint64_t span_bytes(const at::Tensor &tensor) {
    if (tensor.numel() == 0)
        return 0;
    uint64_t elements = 1;
    for (int64_t dim = 0; dim < tensor.dim(); dim++)
        elements += (tensor.size(dim) - 1) * tensor.stride(dim);
    return elements * tensor.itemsize();
}

namespace {

/// A CPU tensor at an address, with the shape and the lazy bits (conjugate, negative) of another tensor.
at::Tensor at_address(void *start, const at::Tensor &like) {
    const at::Tensor found =
        at::from_blob(start, like.sizes(), like.strides(), like.options().device(at::kCPU).requires_grad(false));
    found._set_conj(like.is_conj());
    found._set_neg(like.is_neg());
    return found;
}

} // namespace

at::Tensor as_cpu(const at::Tensor &tensor, const std::string &reader) {
    const uint64_t end = tensor.storage_offset() * tensor.itemsize() + span_bytes(tensor);
    TORCH_CHECK(tensor.numel() == 0 || end <= tensor.storage().nbytes(),
                "sim error: an illegal memory access was encountered: ", reader, " uses a tensor of shape ",
                tensor.sizes(), " that needs ", end, " bytes of a storage of ", tensor.storage().nbytes(), " bytes on ",
                tensor.device());
    auto *const start = static_cast<char *>(shadow_of(tensor.storage().data()));
    return at_address(start ? start + tensor.storage_offset() * tensor.itemsize() : nullptr, tensor);
}

at::Tensor plain_view(const at::Tensor &host) { return at_address(host.data_ptr(), host); }

at::Tensor empty_on(int device, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
    const DeviceScope scope(device);
    return at::detail::empty_strided_generic(sizes, strides, &device_allocator(),
                                             c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
}

void run_operator(const c10::OperatorHandle &op, torch::jit::Stack *stack) {
    for (IValue &result : Call(op, stack).run())
        stack->push_back(std::move(result));
}

void reset_undeferred() {
    std::lock_guard lock(undeferred_lock);
    undeferred_counts.clear();
}

std::map<std::string, uint64_t> undeferred() {
    std::lock_guard lock(undeferred_lock);
    return undeferred_counts;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_operator>()); }

// Torch would run some operators on the device as composites although the CPU has kernels for them, or choose a kernel
// by the device.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    std::vector<std::string> names{"aten::convolution", "aten::convolution_backward"};
    auto &dispatcher = c10::Dispatcher::singleton();
    for (const c10::OperatorName &name : dispatcher.getAllOpNames()) {
        const auto op = dispatcher.findSchema(name);
        const auto has = [&](c10::DispatchKey key) { return op->hasKernelForDispatchKey(key); };
        if (op && name.name.find("aten::") == 0 && has(c10::DispatchKey::CPU) &&
            (has(c10::DispatchKey::CompositeExplicitAutograd) || has(c10::DispatchKey::CompositeImplicitAutograd) ||
             has(c10::DispatchKey::CompositeExplicitAutogradNonFunctional)))
            names.push_back(toString(name));
    }
    for (const std::string &name : names)
        m.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_operator>());
}

} // namespace sim
