#include "host.h"

#include "streams.h"

#include <c10/util/Exception.h>

#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>

namespace sim {
namespace {

constexpr size_t PAGE = 4096;

struct Host {
    std::mutex lock; // guards everything below
    std::map<uintptr_t, uint64_t> ranges;
    std::multimap<uintptr_t, uint64_t> pending; // what copies use that are issued and not done
    uint64_t bytes = 0;
    std::optional<uint64_t> limit;
};
Host &host = *new Host; // never destroyed: tensors may outlive main

/// Whether an entry of a map from start to size overlaps [start, start + bytes). The sizes may differ.
template <class Map> bool overlaps(const Map &ranges, uintptr_t start, uint64_t bytes) {
    for (auto found = ranges.begin(); found != ranges.end() && found->first < start + bytes; ++found)
        if (start < found->first + found->second)
            return true;
    return false;
}

/// Takes a range out. The lock is held.
void forget(std::map<uintptr_t, uint64_t>::iterator range) {
    host.bytes -= range->second;
    host.ranges.erase(range);
}

void free_pinned(void *start) {
    if (!is_bad_fork()) { // where another thread of the parent may have had the lock
        std::lock_guard lock(host.lock);
        if (const auto range = host.ranges.find(reinterpret_cast<uintptr_t>(start)); range != host.ranges.end())
            forget(range);
    }
    std::free(start);
}

/// Memory that is registered while it lives. Pending copies hold their tensors, so that it is never freed under one.
class PinnedAllocator final : public c10::Allocator {
  public:
    c10::DataPtr allocate(size_t bytes) override {
        if (bytes == 0)
            return {nullptr, nullptr, &free_pinned, c10::Device(c10::kCPU)};
        void *start = nullptr;
        TORCH_CHECK(posix_memalign(&start, PAGE, (bytes + PAGE - 1) / PAGE * PAGE) == 0, "no ", bytes,
                    " bytes of host memory");
        try {
            host_register(reinterpret_cast<uintptr_t>(start), bytes);
        } catch (...) {
            std::free(start);
            throw;
        }
        return {start, start, &free_pinned, c10::Device(c10::kCPU)};
    }

    c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
    void copy_data(void *to, const void *from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

} // namespace

void host_register(uintptr_t address, uint64_t bytes) {
    use_context();
    TORCH_CHECK(address && bytes, "sim error: invalid argument: a range of ", bytes, " bytes at ", address);
    std::lock_guard lock(host.lock);
    TORCH_CHECK(!overlaps(host.ranges, address, bytes),
                "sim error: part or all of the requested memory range is already mapped: ", bytes, " bytes at ",
                address);
    TORCH_CHECK(!host.limit || host.bytes + bytes <= *host.limit,
                "sim error: out of memory: the driver refuses to page-lock ", bytes, " bytes beside ", host.bytes,
                ", its limit is ", host.limit.value_or(0));
    host.ranges[address] = bytes;
    host.bytes += bytes;
}

void host_unregister(uintptr_t address) {
    std::lock_guard lock(host.lock);
    const auto found = host.ranges.find(address);
    TORCH_CHECK(found != host.ranges.end(),
                "sim error: pointer does not correspond to a registered memory region: ", address);
    TORCH_CHECK(!overlaps(host.pending, address, found->second),
                "sim error: host memory is unregistered while a copy of it is pending: ", found->second, " bytes at ",
                address);
    forget(found);
}

void set_register_limit(std::optional<uint64_t> bytes) {
    std::lock_guard lock(host.lock);
    host.limit = bytes;
}

uint64_t registered_bytes() {
    std::lock_guard lock(host.lock);
    return host.bytes;
}

uint64_t num_registered() {
    std::lock_guard lock(host.lock);
    return host.ranges.size();
}

bool is_registered(const void *start, uint64_t bytes) {
    const auto address = reinterpret_cast<uintptr_t>(start);
    std::lock_guard lock(host.lock);
    auto range = host.ranges.upper_bound(address);
    if (range != host.ranges.begin()) {
        const auto [first, size] = *std::prev(range);
        if (address < first + size) {
            TORCH_CHECK(address + bytes <= first + size, "sim error: invalid argument: a copy of ", bytes, " bytes at ",
                        address, " passes the end of its page-locked range of ", size, " bytes at ", first);
            return true;
        }
    }
    TORCH_CHECK(range == host.ranges.end() || address + bytes <= range->first,
                "sim error: invalid argument: a copy of ", bytes, " bytes at ", address,
                " starts before a page-locked range at ", range->first, " and ends in it");
    return false;
}

HostUse::HostUse(const void *at, uint64_t num_bytes) : start(reinterpret_cast<uintptr_t>(at)), bytes(num_bytes) {
    std::lock_guard lock(host.lock);
    host.pending.emplace(start, bytes);
}

HostUse::~HostUse() {
    std::lock_guard lock(host.lock);
    const auto [first, last] = host.pending.equal_range(start);
    for (auto use = first; use != last; ++use)
        if (use->second == bytes) {
            host.pending.erase(use);
            return;
        }
}

c10::Allocator &pinned_allocator() {
    static auto &allocator = *new PinnedAllocator;
    return allocator;
}

} // namespace sim
