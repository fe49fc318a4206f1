// Copies between host and devices: where they block, and what they count.
#pragma once

#include <cstdint>

namespace sim {

struct CopyCounts {
    uint64_t to_device_bytes, to_host_bytes, between_devices_bytes; // of the copies issued
    uint64_t num_pageable;                                          // copies whose host memory is not page-locked
};
CopyCounts copy_counts();
void reset_copy_counts();

} // namespace sim
