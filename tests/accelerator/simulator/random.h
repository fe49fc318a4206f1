// Random numbers: one generator per device, which draws what the CPU's generator of the same seed draws.
//
// Its state advances when the host issues an operation, so that values do not depend on the schedule.
#pragma once

#include <ATen/core/Generator.h>

namespace sim {

/// The default generator of a device. Makes no context.
const at::Generator &default_generator(int device);
at::Generator new_generator(int device);
/// The CPU generator inside a device's, which the CPU's kernels accept. Throws if `generator` is of another device.
at::Generator cpu_generator_of(const at::Generator &generator, int device);

} // namespace sim
