// engine: what a queue asks of a way to do I/O: one static table of functions for each.
//
//     open -> (push ... reap)* -> close        all on the queue's own thread
//     wake                                     from any thread
//
// An engine moves the bytes of one block and says what the kernel said. It splits nothing, orders
// nothing, retries nothing: that is the queue's work, done once for all engines.
//
// A new engine takes
//     its own file, named in CMakeLists.txt
//     its name in the line below of extern names
//     its line in enum tm_engine of tiermem.h, at its place among those that AUTO tries
//     its line in `engines` of queue_open.cpp
//     its name in ENGINES of swap/base/engines.py
//     its name in docs/glossary.md; docs/keys.md is generated
#ifndef TIERMEM_ENGINE_H
#define TIERMEM_ENGINE_H

#include <stdint.h>
#include <thread>

#include "tiermem.h"

// One block. The slot is the queue's name for it and comes back with its completion.
struct tm_request {
    char *buffer;
    uint64_t offset;
    uint32_t length;
    uint32_t slot;
    int fd;
    int kind; // enum tm_kind
};

struct tm_completion {
    uint32_t slot;
    int64_t result; // bytes transferred, or -errno
};

enum tm_push {
    TM_PUSH_QUEUED, // the engine has it; the kernel sees it at the latest in the next reap
    TM_PUSH_DONE,   // it ended at once; *result says how. For errors: engine_faulty applies LATE in reap alone
    TM_PUSH_FULL    // not taken; push it again after a reap
};

enum tm_reap_mode { TM_REAP_LOOK, TM_REAP_WAIT };

struct tm_engine_state; // each engine's own

struct tm_engine_functions {
    const char *name;
    // On failure -errno, and `why` says what was missing. On success `why` may hold a remark.
    int (*open)(const tm_queue_options *options, tm_engine_state **state, char *why, uint32_t why_bytes);
    tm_push (*push)(tm_engine_state *state, const tm_request *request, int64_t *result);
    // Hands over what was pushed and collects at most `max` completions. TM_REAP_WAIT sleeps until
    // there is one, or until wake(); it may also return early with none. The count, or -errno.
    int (*reap)(tm_engine_state *state, tm_reap_mode mode, tm_completion *completions, uint32_t max);
    // Ends a sleeping reap, or the next one to sleep. Any thread.
    void (*wake)(tm_engine_state *state);
    // System calls made so far. Any thread.
    uint64_t (*kernel_entries)(const tm_engine_state *state);
    // Nothing is in flight any more.
    void (*close)(tm_engine_state *state);
    // CPU time, in nanoseconds, of the threads that the engine started. Any thread. NULL: it starts none.
    int64_t (*cpu_ns)(tm_engine_state *state);
};

extern const tm_engine_functions tm_engine_uring, tm_engine_aio, tm_engine_threads;

// Wraps `inner` (already open) in the rules of options->faults. Closing the wrapper closes `inner`.
int tm_engine_faulty_open(const tm_queue_options *options, const tm_engine_functions *inner,
                          tm_engine_state *inner_state, tm_engine_state **state);
extern const tm_engine_functions tm_engine_faulty;

// CPU time of a thread that has not been joined, user and system, in nanoseconds; 0 when it ended.
int64_t tm_thread_cpu_ns(std::thread *thread);

// The calling thread, which sleeps between transfers, gets a core soon after it wakes, though others compute: it asks
// for short slices. Kernels before Linux 6.12 know none, which changes nothing.
void tm_thread_wakes_soon();

// True when the file was opened with O_DIRECT, whose transfers start on multiples of TM_DIRECT_ALIGN.
bool tm_engine_is_direct(int fd);
static const uint64_t TM_DIRECT_ALIGN = 4096;

#endif
