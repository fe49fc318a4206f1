// The loops compiled for AVX-512; CMakeLists.txt gives the flags.
#define TM_LOOPS tm_loops_avx512
#define TM_DOUBLES 8
#include "loops_body.h"
