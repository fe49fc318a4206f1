// Shapes: what an operator will return, told by its Meta kernel before the operator runs.
#pragma once

#include "values.h"

#include <memory>

namespace sim {

struct Shapes {
    std::vector<at::Tensor> stand_ins; // meta tensors for the different tensors among the arguments, in their order
    Values results;                    // meta tensors: a stand-in, a view of one, or new
};

/// Calls the Meta kernel of an operator, or remembers what it said for arguments of the same shapes and values (many
/// Meta kernels are written in Python and slow). Throws what the kernel throws: c10::NotImplementedError if there is
/// none.
std::shared_ptr<const Shapes> shapes_of(const c10::OperatorHandle &op, const Values &arguments);

} // namespace sim
