// Device memory: addresses that the host cannot touch, and a caching allocator over them.
//
//   address of a tensor ──(+ constant)──> shadow: the bytes themselves, which only the simulator's operations touch
//
// Addresses are PROT_NONE: a host access is a SIGSEGV. New memory is NaN (0xFF). Freed memory becomes NaN in the order
// of the stream that allocated it, where it may be given out again at once: the rule of CUDA's caching allocator. A
// block that another stream still uses, without record_stream, is overwritten under it.
//
// That is stricter than CUDA, where the next owner overwrites the block, whose stream may wait for the other by then.
//
// Segments have the size of the request that made them, rounded to 512 bytes; CUDA's are 2 MiB, 20 MiB or the request.
#pragma once

#include "streams.h"

#include <c10/core/CachingDeviceAllocator.h>

namespace sim {

/// The allocator of all devices. It allocates on the current device and stream.
c10::DeviceAllocator &device_allocator();
/// Where the bytes of a device address are. Null stays null.
void *shadow_of(const void *address);

/// Whether a block is overwritten when it is freed (the default), or only when it is given out again.
void set_strict_frees(bool are_strict);

/// Bytes that a device can reserve. Where more are reserved already, the next segment fails.
void set_capacity(int device, uint64_t bytes);

} // namespace sim
