// What torch asks of a device: its guard (devices, streams, events) and its hooks (context, generators, pinned memory,
// storages).
#include "host.h"
#include "memory.h"
#include "operators.h"
#include "random.h"
#include "streams.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>
#include <memory>

namespace sim {
namespace {

/// An event: a mark, and the time at which the stream got there if the event measures time.
struct Event {
    Mark mark;
    std::shared_ptr<double> time_ms;
};

double now_ms() {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
  public:
    c10::DeviceType type() const override { return DEVICE_TYPE; }

    c10::Device exchangeDevice(c10::Device device) const override {
        const c10::Device before = getDevice();
        setDevice(device);
        return before;
    }
    c10::Device getDevice() const override { return device_of(current_device()); }
    void setDevice(c10::Device device) const override {
        if (device.has_index()) {
            check_device(device.index());
            set_current_device(device.index());
        }
    }
    void uncheckedSetDevice(c10::Device device) const noexcept override {
        if (device.has_index())
            set_current_device(device.index());
    }
    c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(device_count()); }
    c10::DeviceCapability getDeviceCapability(c10::Device /*device*/) const override { return {}; }

    c10::Stream getStream(c10::Device device) const override { return current_stream(index_of(device)); }
    c10::Stream getDefaultStream(c10::Device device) const override { return default_stream(index_of(device)); }
    c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
        return stream_of_pool(index_of(device));
    }
    c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*priority*/) const override {
        return stream_of_pool(index_of(device));
    }
    c10::Stream exchangeStream(c10::Stream stream) const override { return set_current_stream(stream); }
    bool queryStream(const c10::Stream &stream) const override { return query(mark_of(stream)); }
    void synchronizeStream(const c10::Stream &stream) const override {
        wait_on_host(mark_of(stream), "stream.synchronize");
    }
    void synchronizeDevice(const c10::DeviceIndex device) const override {
        if (has_context())
            wait_on_host_for_device(device, "synchronize");
    }

    void record(void **event, const c10::Stream &stream, const c10::DeviceIndex /*device*/,
                const c10::EventFlag flag) const override {
        use_context();
        if (!*event)
            *event = new Event;
        auto *const mine = static_cast<Event *>(*event);
        if (flag == c10::EventFlag::BACKEND_DEFAULT) {
            mine->time_ms = std::make_shared<double>(0);
            issue(stream, {[time_ms = mine->time_ms] { *time_ms = now_ms(); }, {}, {}});
        }
        mine->mark = mark_of(stream);
    }
    void block(void *event, const c10::Stream &stream) const override {
        if (event)
            make_wait(stream, static_cast<Event *>(event)->mark);
    }
    bool queryEvent(void *event) const override { return !event || query(static_cast<Event *>(event)->mark); }
    void synchronizeEvent(void *event) const override {
        if (event)
            wait_on_host(static_cast<Event *>(event)->mark, "event.synchronize");
    }
    void destroyEvent(void *event, const c10::DeviceIndex /*device*/) const noexcept override {
        delete static_cast<Event *>(event);
    }
    double elapsedTime(void *first, void *second, const c10::DeviceIndex /*device*/) const override {
        const auto *const from = static_cast<Event *>(first), *const to = static_cast<Event *>(second);
        TORCH_CHECK(from && to && from->time_ms && to->time_ms,
                    "elapsed_time needs two recorded events with enable_timing=True");
        TORCH_CHECK(is_done(from->mark) && is_done(to->mark),
                    "sim error: device not ready: wait for both events first");
        return *to->time_ms - *from->time_ms;
    }

    void recordDataPtrOnStream(const c10::DataPtr &data, const c10::Stream &stream) const override {
        device_allocator().recordStream(data, stream);
    }

  private:
    static int index_of(c10::Device device) { return device.has_index() ? device.index() : current_device(); }
};

class Hooks final : public at::PrivateUse1HooksInterface {
  public:
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return device_count() > 0; }
    bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override { return has_context(); }
    void init() const override { use_context(); }

    c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(device_count()); }
    c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device()); }
    void setCurrentDevice(c10::DeviceIndex device) const override {
        check_device(device);
        set_current_device(device);
    }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
        const c10::DeviceIndex before = getCurrentDevice();
        if (device >= 0)
            setCurrentDevice(device);
        return before;
    }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }

    const at::Generator &getDefaultGenerator(c10::DeviceIndex device) const override {
        return default_generator(device);
    }
    at::Generator getNewGenerator(c10::DeviceIndex device) const override { return new_generator(device); }
    at::Device getDeviceFromPtr(void * /*data*/) const override { return device_of(current_device()); }

    bool isPinnedPtr(const void *data) const override { return data && has_context() && is_registered(data, 0); }
    c10::Allocator *getPinnedMemoryAllocator() const override { return &pinned_allocator(); }

    /// Allocates anew on the current stream, keeps the bytes that both sizes have, frees the old ones in stream order.
    void resizePrivateUse1Bytes(const c10::Storage &storage, size_t num_bytes) const override {
        auto *const impl = storage.unsafeGetStorageImpl();
        const DeviceScope scope(impl->device().index());
        c10::DataPtr data = device_allocator().allocate(num_bytes);
        const size_t kept = std::min(num_bytes, impl->nbytes());
        if (kept) {
            void *const to = shadow_of(data.get()), *const from = shadow_of(impl->mutable_data());
            issue(current_stream(current_device()), {[=] { std::memcpy(to, from, kept); }, {}, {}},
                  {"resize_", Lane::COMPUTE, 2 * kept});
        }
        impl->set_data_ptr_noswap(std::move(data));
        impl->set_nbytes(num_bytes);
    }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

const bool is_registered_with_torch = [] {
    c10::SetAllocator(DEVICE_TYPE, &device_allocator());
    at::RegisterPrivateUse1HooksInterface(new Hooks);
    return true;
}();

} // namespace
} // namespace sim
