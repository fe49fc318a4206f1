// Included before every C++ file: std::condition_variable::wait by the version that libstdc++ has kept since GCC 4.4.
// By its newest version (GCC 12) alone the module would ask for a C library of 2022.
#pragma once

#include <cstddef>

#ifdef __GLIBCXX__
__asm__(".symver _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE,"
        "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");
#endif
