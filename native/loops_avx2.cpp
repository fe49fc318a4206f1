// The loops compiled for AVX2; CMakeLists.txt gives the flags.
#define TM_LOOPS tm_loops_avx2
#define TM_DOUBLES 4
#include "loops_body.h"
