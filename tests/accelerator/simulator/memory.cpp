#include "memory.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>
#include <vector>

namespace sim {
namespace {

using c10::CachingAllocator::StatArray;
using c10::CachingAllocator::StatType;

constexpr uint64_t DEVICE_SPAN = 1ull << 36; // addresses of one device: 64 GiB
constexpr uint64_t GRAIN = 512;
constexpr uint64_t LARGE = 1 << 20; // what is larger is cut from segments of its own, as CUDA's pools do

std::atomic<bool> are_frees_strict{true};
std::atomic<bool> are_segments_like_cudas{false};

/// The addresses and their shadow, taken from the system when a device is first used.
struct Addresses {
    char *device;
    char *shadow;

    Addresses() : device(take(PROT_NONE)), shadow(take(PROT_READ | PROT_WRITE)) {}

    static char *take(int protection) {
        constexpr int FLAGS = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        void *const start = mmap(nullptr, DEVICE_SPAN * device_count(), protection, FLAGS, -1, 0);
        TORCH_CHECK(start != MAP_FAILED, "sim: no address space for ", device_count(),
                    " devices of 64 GiB: ", strerror(errno));
        return static_cast<char *>(start);
    }
};

Addresses &addresses() {
    static auto &found = *new Addresses;
    return found;
}

/// A range of a segment, in use or cached. The blocks of a segment are linked in address order.
struct Block {
    char *start;
    uint64_t bytes;
    int64_t stream;   // the stream that allocated it, and whose order frees follow
    bool is_in_large; // its segment is one for large requests
    bool is_used = true;
    bool is_nan = true; // while it is free: overwritten, or will be before the stream's next operation
    Block *previous = nullptr;
    Block *next = nullptr;
    std::set<int64_t> other_streams = {}; // named by record_stream
};

struct BySize {
    bool operator()(const Block *a, const Block *b) const {
        return a->bytes != b->bytes ? a->bytes < b->bytes : a->start < b->start;
    }
};
using Pool = std::set<Block *, BySize>;

/// A block that was freed while other streams may use it, as record_stream said.
struct PendingFree {
    Block *block;
    std::vector<Mark> uses;
};

struct Device {
    uint64_t capacity = 0;                           // device.py sets it
    std::map<std::pair<int64_t, bool>, Pool> cached; // by stream, and whether the segment is for large blocks
    std::vector<PendingFree> pending_frees;          // not yet cached
    std::map<char *, uint64_t> free_addresses;       // gaps below `top`, by address
    uint64_t top = 0;                                // addresses taken so far
    c10::CachingDeviceAllocator::DeviceStats stats{};
};

struct Memory {
    std::mutex lock; // guards everything below; never held while operations are issued
    std::array<Device, MAX_DEVICES> devices;
    std::unordered_map<char *, Block *> used; // by address
};
Memory &memory = *new Memory; // never destroyed: tensors may outlive main

int device_at(const char *address) { return static_cast<int>((address - addresses().device) / DEVICE_SPAN); }
bool is_large(uint64_t bytes) { return bytes > LARGE; }

template <class Change> void count(StatArray &stat, bool large, Change change) {
    change(stat[static_cast<size_t>(StatType::AGGREGATE)]);
    change(stat[static_cast<size_t>(large ? StatType::LARGE_POOL : StatType::SMALL_POOL)]);
}
void increase(StatArray &stat, uint64_t amount, bool large) {
    count(stat, large, [=](auto &one) { one.increase(amount); });
}
void decrease(StatArray &stat, uint64_t amount, bool large) {
    count(stat, large, [=](auto &one) { one.decrease(amount); });
}
uint64_t total(const StatArray &stat) { return stat[static_cast<size_t>(StatType::AGGREGATE)].current; }

// ---- addresses ------------------------------------------------------------------------------------------------------

/// First fit among the gaps, else from the top. Null: none are left.
char *take_addresses(Device &device, int index, uint64_t bytes) {
    for (auto gap = device.free_addresses.begin(); gap != device.free_addresses.end(); ++gap) {
        const auto [start, gap_bytes] = *gap;
        if (gap_bytes < bytes)
            continue;
        device.free_addresses.erase(gap);
        if (gap_bytes > bytes)
            device.free_addresses.emplace(start + bytes, gap_bytes - bytes);
        return start;
    }
    if (device.top + bytes > DEVICE_SPAN)
        return nullptr;
    char *const start = addresses().device + index * DEVICE_SPAN + device.top;
    device.top += bytes;
    return start;
}

void give_addresses(Device &device, char *start, uint64_t bytes) {
    char *const shadow = static_cast<char *>(shadow_of(start));
    char *const first_page = reinterpret_cast<char *>((reinterpret_cast<uintptr_t>(shadow) + 4095) & ~4095ull);
    char *const last_page = reinterpret_cast<char *>(reinterpret_cast<uintptr_t>(shadow + bytes) & ~4095ull);
    if (first_page < last_page)
        madvise(first_page, last_page - first_page, MADV_DONTNEED);
    const auto gap = device.free_addresses.emplace(start, bytes).first;
    if (const auto after = std::next(gap);
        after != device.free_addresses.end() && start + gap->second == after->first) {
        gap->second += after->second;
        device.free_addresses.erase(after);
    }
    if (gap != device.free_addresses.begin()) {
        const auto before = std::prev(gap);
        if (before->first + before->second == start) {
            before->second += gap->second;
            device.free_addresses.erase(gap);
        }
    }
}

// ---- blocks ---------------------------------------------------------------------------------------------------------

/// Puts a free block into its pool, joined with free neighbours.
void put_into_cache(Device &device, Block *block) {
    Pool &pool = device.cached[{block->stream, block->is_in_large}];
    const auto swallow = [&](Block *other) { // the right neighbour
        block->bytes += other->bytes;
        block->is_nan &= other->is_nan;
        block->next = other->next;
        if (block->next)
            block->next->previous = block;
        delete other;
    };
    block->is_used = false;
    block->is_nan = are_frees_strict;
    block->other_streams.clear();
    if (Block *const right = block->next; right && !right->is_used) {
        pool.erase(right);
        swallow(right);
    }
    if (Block *const left = block->previous; left && !left->is_used) {
        pool.erase(left);
        Block *const right = block;
        block = left;
        swallow(right);
    }
    pool.insert(block);
}

/// Bytes of the segment that a request makes.
uint64_t segment_bytes(uint64_t bytes) {
    if (!are_segments_like_cudas)
        return bytes;
    if (!is_large(bytes))
        return 2 << 20;
    return bytes < 10 << 20 ? 20 << 20 : (bytes + (2 << 20) - 1) & ~((2ull << 20) - 1);
}

/// What a cut leaves of a block has more bytes than this.
uint64_t smallest_rest(uint64_t bytes) { return are_segments_like_cudas && is_large(bytes) ? LARGE : 0; }

/// The smallest cached block that is large enough, cut to size. Null: there is none.
Block *take_from_cache(Device &device, int64_t stream, uint64_t bytes) {
    Pool &pool = device.cached[{stream, is_large(bytes)}];
    Block wanted{nullptr, bytes, stream, is_large(bytes)};
    const auto found = pool.lower_bound(&wanted);
    if (found == pool.end())
        return nullptr;
    Block *const block = *found;
    pool.erase(found);
    if (block->bytes > bytes + smallest_rest(bytes)) {
        Block *const rest = new Block{
            block->start + bytes, block->bytes - bytes, stream, block->is_in_large, false, block->is_nan, block,
            block->next};
        if (rest->next)
            rest->next->previous = rest;
        block->next = rest;
        block->bytes = bytes;
        pool.insert(rest);
    }
    block->is_used = true;
    return block;
}

/// A new segment as a free block. False: the capacity or the addresses do not suffice.
bool add_segment(Device &device, int index, int64_t stream, uint64_t request) {
    const uint64_t bytes = segment_bytes(request);
    if (total(device.stats.reserved_bytes) + bytes > device.capacity)
        return false;
    char *const start = take_addresses(device, index, bytes);
    if (!start)
        return false;
    const bool large = is_large(request);
    std::memset(shadow_of(start), 0xff, bytes);
    increase(device.stats.reserved_bytes, bytes, large);
    increase(device.stats.segment, 1, large);
    device.stats.num_device_alloc++;
    device.cached[{stream, large}].insert(new Block{start, bytes, stream, large, false});
    return true;
}

/// Gives the segments that are free as a whole back to the device.
void free_segments(Device &device) {
    for (auto &[key, pool] : device.cached)
        for (auto next = pool.begin(); next != pool.end();) {
            Block *const block = *next;
            if (block->previous || block->next) {
                ++next;
                continue;
            }
            next = pool.erase(next);
            decrease(device.stats.reserved_bytes, block->bytes, block->is_in_large);
            decrease(device.stats.segment, 1, block->is_in_large);
            device.stats.num_device_free++;
            give_addresses(device, block->start, block->bytes);
            delete block;
        }
}

// ---- frees ----------------------------------------------------------------------------------------------------------

/// Makes a block NaN in the order of its stream, but where times are measured: no device spends time on it. The lock is
/// not held.
void overwrite(int index, const Block *block) {
    if (schedule() == Schedule::THREADS)
        return;
    void *const bytes = shadow_of(block->start);
    const uint64_t num_bytes = block->bytes;
    const c10::Stream stream(c10::Stream::UNSAFE, sim::device_of(index), block->stream);
    issue(stream, {[=] { std::memset(bytes, 0xff, num_bytes); }, {}, {}});
}

/// Lets the block's stream have it again. Takes the lock by itself.
void free_in_stream_order(int index, Block *block) {
    if (are_frees_strict)
        overwrite(index, block);
    const uint64_t num_bytes = block->bytes;
    std::lock_guard lock(memory.lock);
    Device &device = memory.devices[index];
    decrease(device.stats.active, 1, block->is_in_large);
    decrease(device.stats.active_bytes, num_bytes, block->is_in_large);
    put_into_cache(device, block);
}

/// Frees what was freed while other streams used it, where they are done.
void finish_pending_frees(int index) {
    std::vector<Block *> done;
    {
        std::lock_guard lock(memory.lock);
        auto &pending = memory.devices[index].pending_frees;
        for (auto next = pending.begin(); next != pending.end();) {
            if (!std::all_of(next->uses.begin(), next->uses.end(), [](const Mark &use) { return is_done(use); })) {
                ++next;
                continue;
            }
            done.push_back(next->block);
            next = pending.erase(next);
        }
    }
    for (Block *const block : done)
        free_in_stream_order(index, block);
}

void free_block(void *address) {
    if (!address || is_bad_fork())
        return;
    char *const start = static_cast<char *>(address);
    const int index = device_at(start);
    Block *block;
    {
        std::lock_guard lock(memory.lock);
        Device &device = memory.devices[index];
        block = memory.used.at(start);
        memory.used.erase(start);
        decrease(device.stats.allocation, 1, block->is_in_large);
        decrease(device.stats.allocated_bytes, block->bytes, block->is_in_large);
        if (!block->other_streams.empty()) {
            PendingFree pending{block, {}};
            for (const int64_t stream : block->other_streams)
                pending.uses.push_back(mark_of(c10::Stream(c10::Stream::UNSAFE, sim::device_of(index), stream)));
            device.pending_frees.push_back(std::move(pending));
            return;
        }
    }
    free_in_stream_order(index, block);
}

// ---- the allocator --------------------------------------------------------------------------------------------------

std::string in_words(uint64_t bytes) {
    constexpr uint64_t MIB = 1 << 20;
    return bytes < MIB ? c10::str(bytes, " bytes") : c10::str(bytes / MIB, ".", bytes % MIB * 10 / MIB, " MiB");
}

class Allocator final : public c10::DeviceAllocator {
  public:
    c10::DataPtr allocate(size_t num_bytes) override {
        const int index = current_device();
        check_device(index);
        use_context();
        if (num_bytes == 0)
            return {nullptr, nullptr, &free_block, sim::device_of(index)};
        const uint64_t bytes = (num_bytes + GRAIN - 1) / GRAIN * GRAIN;
        finish_pending_frees(index);
        Block *block = find(index, bytes);
        if (!block) {
            empty_device(index);
            block = find(index, bytes);
        }
        if (!block)
            raise_out_of_memory(index, bytes);
        if (!block->is_nan)
            overwrite(index, block);
        std::lock_guard lock(memory.lock);
        Device &device = memory.devices[index];
        increase(device.stats.allocation, 1, is_large(bytes));
        increase(device.stats.allocated_bytes, block->bytes, is_large(bytes));
        increase(device.stats.requested_bytes, num_bytes, is_large(bytes));
        increase(device.stats.active, 1, is_large(bytes));
        increase(device.stats.active_bytes, block->bytes, is_large(bytes));
        memory.used[block->start] = block;
        return {block->start, block->start, &free_block, sim::device_of(index)};
    }

    c10::DeleterFnPtr raw_deleter() const override { return &free_block; }

    void copy_data(void *to, const void *from, size_t num_bytes) const override {
        const c10::Stream stream = current_stream(device_at(static_cast<char *>(to)));
        void *const target = shadow_of(to), *const source = shadow_of(from);
        issue(stream, {[=] { std::memcpy(target, source, num_bytes); }, {}, {}},
              {"copy_data", Lane::COMPUTE, 2 * num_bytes});
    }

    bool initialized() override { return has_context(); }

    void emptyCache(c10::MempoolId_t /*pool*/) override {
        for (int index = 0; has_context() && index < device_count(); index++)
            empty_device(index);
    }

    void recordStream(const c10::DataPtr &data, c10::Stream stream) override {
        std::lock_guard lock(memory.lock);
        const auto found = memory.used.find(static_cast<char *>(data.get()));
        if (found != memory.used.end() && found->second->stream != stream.id())
            found->second->other_streams.insert(stream.id());
    }

    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
        check_device(index);
        std::lock_guard lock(memory.lock);
        return memory.devices[index].stats;
    }

    void resetAccumulatedStats(c10::DeviceIndex index) override {
        for_each_stat(index, [](auto &stat) { stat.reset_accumulated(); });
    }

    void resetPeakStats(c10::DeviceIndex index) override {
        for_each_stat(index, [](auto &stat) { stat.reset_peak(); });
    }

    std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
        check_device(index);
        std::lock_guard lock(memory.lock);
        const Device &device = memory.devices[index];
        const uint64_t reserved = total(device.stats.reserved_bytes);
        return {device.capacity > reserved ? device.capacity - reserved : 0, device.capacity};
    }

  private:
    /// Waits for the device, as cudaFree does, and gives back the segments that no tensor uses.
    static void empty_device(int index) {
        {
            std::lock_guard lock(memory.lock);
            const Device &device = memory.devices[index];
            if (device.pending_frees.empty() && std::all_of(device.cached.begin(), device.cached.end(),
                                                            [](const auto &pool) { return pool.second.empty(); }))
                return;
        }
        wait_on_host_for_device(index, "empty_cache");
        finish_pending_frees(index);
        run_device(index);
        std::lock_guard lock(memory.lock);
        free_segments(memory.devices[index]);
    }

    static Block *find(int index, uint64_t bytes) {
        std::lock_guard lock(memory.lock);
        Device &device = memory.devices[index];
        const int64_t stream = current_stream(index).id();
        if (Block *const cached = take_from_cache(device, stream, bytes))
            return cached;
        return add_segment(device, index, stream, bytes) ? take_from_cache(device, stream, bytes) : nullptr;
    }

    [[noreturn]] static void raise_out_of_memory(int index, uint64_t bytes) {
        std::lock_guard lock(memory.lock);
        Device &device = memory.devices[index];
        device.stats.num_ooms++;
        const uint64_t reserved = total(device.stats.reserved_bytes), used = total(device.stats.allocated_bytes);
        TORCH_CHECK_WITH(OutOfMemoryError, false, "sim out of memory. Tried to allocate ", in_words(bytes),
                         ". Device sim:", index, " has a total capacity of ", in_words(device.capacity), ", of which ",
                         in_words(reserved), " are reserved: ", in_words(used), " by tensors and ",
                         in_words(reserved - used), " are cached.");
    }

    template <class Act> static void for_each_stat(c10::DeviceIndex index, Act act) {
        check_device(index);
        std::lock_guard lock(memory.lock);
        auto &stats = memory.devices[index].stats;
        for (StatArray *const array :
             {&stats.allocation, &stats.segment, &stats.active, &stats.inactive_split, &stats.allocated_bytes,
              &stats.reserved_bytes, &stats.active_bytes, &stats.inactive_split_bytes, &stats.requested_bytes})
            for (auto &stat : *array)
                act(stat);
    }
};

} // namespace

c10::DeviceAllocator &device_allocator() {
    static auto &allocator = *new Allocator;
    return allocator;
}

void *shadow_of(const void *address) {
    if (!address)
        return nullptr;
    const Addresses &both = addresses();
    return both.shadow + (static_cast<const char *>(address) - both.device);
}

void set_strict_frees(bool are_strict) { are_frees_strict = are_strict; }

void set_segments_like_cudas(bool are_alike) { are_segments_like_cudas = are_alike; }

void set_capacity(int device, uint64_t bytes) {
    check_device(device);
    std::lock_guard lock(memory.lock);
    memory.devices[device].capacity = bytes;
}

} // namespace sim
