// The loops compiled for any CPU; CMakeLists.txt gives the flags.
#define TM_LOOPS tm_loops_plain
#define TM_DOUBLES 2
#include "loops_body.h"
