// Host memory: the ranges that are page-locked, and an allocator of page-locked memory.
//
// A copy to or from a page-locked range is issued and the call returns. A copy of other (pageable) memory blocks, as
// CUDA's does. A copy that touches a range and lies partly outside is an error.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>
#include <optional>

namespace sim {

/// Page-locks a range. Throws where it overlaps one, and where the limit refuses it.
void host_register(uintptr_t address, uint64_t bytes);
/// Ends a registration by its first address. Throws where there is none, and where a copy of the range is pending.
void host_unregister(uintptr_t address);
/// Refuses registrations beyond so many bytes in all, as a driver does; nothing: no limit.
void set_register_limit(std::optional<uint64_t> bytes);
uint64_t registered_bytes();
uint64_t num_registered();

/// Whether one range holds these bytes. Throws "invalid argument" where they lie partly in a range.
bool is_registered(const void *start, uint64_t bytes);

/// Says that a pending copy uses a range, from its issue until it is done.
class HostUse {
  public:
    HostUse(const void *start, uint64_t bytes);
    HostUse(const HostUse &) = delete;
    HostUse &operator=(const HostUse &) = delete;
    ~HostUse();

  private:
    uintptr_t start;
    uint64_t bytes;
};

c10::Allocator &pinned_allocator();

} // namespace sim
