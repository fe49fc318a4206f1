#include "random.h"

#include "streams.h"

#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/TensorImpl.h>

#include <deque>

namespace sim {
namespace {

class DeviceGenerator final : public c10::GeneratorImpl {
  public:
    explicit DeviceGenerator(int index)
        : GeneratorImpl(device_of(index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
          drawing(at::detail::createCPUGenerator()) {}

    void set_current_seed(uint64_t seed) override { drawing.set_current_seed(seed); }
    uint64_t current_seed() const override { return drawing.current_seed(); }
    uint64_t seed() override { return drawing.seed(); }
    void set_offset(uint64_t offset) override { drawing.set_offset(offset); }
    uint64_t get_offset() const override { return drawing.get_offset(); }
    void set_state(const c10::TensorImpl &state) override { drawing.unsafeGetGeneratorImpl()->set_state(state); }
    c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
        return drawing.unsafeGetGeneratorImpl()->get_state();
    }

    at::Generator drawing; // the CPU's, whose sequence this one has

  private:
    DeviceGenerator *clone_impl() const override {
        auto *const copy = new DeviceGenerator(device().index());
        copy->drawing = drawing.clone();
        return copy;
    }
};

} // namespace

const at::Generator &default_generator(int device) {
    static const auto &generators = *new std::deque<at::Generator>([] {
        std::deque<at::Generator> made;
        for (int index = 0; index < device_count(); index++)
            made.push_back(new_generator(index));
        return made;
    }());
    if (device < 0)
        device = current_device();
    check_device(device);
    return generators[device];
}

at::Generator new_generator(int device) {
    return at::make_generator<DeviceGenerator>(device < 0 ? current_device() : device);
}

at::Generator cpu_generator_of(const at::Generator &generator, int device) {
    TORCH_CHECK(generator.device() == device_of(device), "Expected a '", device_of(device),
                "' device type for generator but found '", generator.device(), "'");
    return generator.get<DeviceGenerator>()->drawing;
}

} // namespace sim
