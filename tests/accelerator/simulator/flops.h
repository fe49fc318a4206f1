// Floating-point operations of an operator, by the shapes of its arguments: for the recording's labels.
#pragma once

#include "values.h"

#include <string>

namespace sim {

/// Matrix products, convolutions and attention, with a multiplication and an addition counted as two; 0 for all else.
double flops_of(const std::string &name, const Values &arguments, const Values &results);

} // namespace sim
