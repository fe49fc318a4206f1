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
// Segments have the size of the request that made them, rounded to 512 bytes. CUDA's are 2 MiB for requests of up to 1
// MiB, 20 MiB for those below 10 MiB, else the request in multiples of 2 MiB; it cuts from large blocks what leaves
// more than 1 MiB. `set_segments_like_cudas` does the same.
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

/// Whether segments have the sizes of CUDA's (not by default). Call it while nothing is allocated or cached.
void set_segments_like_cudas(bool are_alike);

/// Bytes that a device can reserve. Where more are reserved already, the next segment fails.
void set_capacity(int device, uint64_t bytes);

} // namespace sim
