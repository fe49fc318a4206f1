// check: the few lines a native test needs. A failed check says what it saw and ends the program.
#ifndef TIERMEM_CHECK_H
#define TIERMEM_CHECK_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);                                    \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

#define CHECK_EQUAL(seen, wanted)                                                                                      \
    do {                                                                                                               \
        const long long seen_ = (long long)(seen), wanted_ = (long long)(wanted);                                      \
        if (seen_ != wanted_) {                                                                                        \
            fprintf(stderr, "%s:%d: %s is %lld, wanted %lld\n", __FILE__, __LINE__, #seen, seen_, wanted_);            \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

#define RUN(test, ...)                                                                                                 \
    do {                                                                                                               \
        test(__VA_ARGS__);                                                                                             \
        printf("ok %s(%s)\n", #test, #__VA_ARGS__);                                                                    \
    } while (0)

// The same numbers in every run (splitmix64).
struct Numbers {
    uint64_t state;
    uint64_t next() {
        uint64_t z = state += 0x9e3779b97f4a7c15ull;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        return z ^ (z >> 31);
    }
    // Uniform in [-1, 1).
    float uniform() { return (float)(int64_t)next() * (1.0f / 9223372036854775808.0f); }
};

#endif
