// bell: how a queue tells a program that one of its tags was answered, and how a program says how much is in flight.
#ifndef TIERMEM_BELL_H
#define TIERMEM_BELL_H

#include <condition_variable>
#include <mutex>
#include <stdint.h>

#include "tiermem.h"

// Counts rings, so that one between a look and a wait is not lost. Its mutex is the last that is taken.
struct tm_bell {
    std::mutex mutex;
    std::condition_variable rung;
    uint64_t num_rings = 0;

    void ring() {
        std::lock_guard<std::mutex> lock(mutex);
        ++num_rings;
        rung.notify_one();
    }
    uint64_t count() {
        std::lock_guard<std::mutex> lock(mutex);
        return num_rings;
    }
    void wait_beyond(uint64_t seen) {
        std::unique_lock<std::mutex> lock(mutex);
        rung.wait(lock, [&] { return num_rings != seen; });
    }
};

// tm_queue_submit, whose tags ring `bell` when they are answered; it lives until then. tm_queue_wait with a timeout of
// 0 then takes the answer. most_bytes: no block is cut beyond so many bytes in flight while such tags are open; the
// last call counts.
int tm_queue_submit_ringing(tm_queue *queue, const tm_op *ops, uint32_t n, tm_bell *bell, uint64_t most_bytes);

#endif
