// cpu: which instruction set the kernels use, and the floating-point mode they run in.
#ifndef TIERMEM_CPU_H
#define TIERMEM_CPU_H

#include "loops.h"

// The loops of the instruction set in force (see tm_isa_choose).
const tm_loops *tm_loops_chosen();

// Round to nearest, denormals exact, every exception masked: for as long as this object lives, on
// this thread. Kernels give the same bits whatever the caller (or a library it uses) had set.
class tm_float_mode {
  public:
    tm_float_mode();
    ~tm_float_mode();
    tm_float_mode(const tm_float_mode &) = delete;
    tm_float_mode &operator=(const tm_float_mode &) = delete;

  private:
    unsigned saved_;
};

#endif
