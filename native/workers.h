// workers: how a kernel hands its tasks to the shared threads.
#ifndef TIERMEM_WORKERS_H
#define TIERMEM_WORKERS_H

#include <stdint.h>

#include "tiermem.h"

typedef void (*tm_task)(void *context, uint64_t index);

// Calls task(context, i) once for every i < num_tasks, in any order, on the caller and the workers, in
// the float mode of cpu.h. Returns when all have ended. `workers` may be NULL: the caller alone.
void tm_workers_run(tm_workers *workers, uint64_t num_tasks, tm_task task, void *context);

#endif
