// gradient: stores or accumulates a gradient and measures it in the same pass.
//
// A task is one norm block (or the part of one that the call covers), so its sum is added up by one
// thread in one order. Inside, chunks stay in the first-level cache.

#include <errno.h>
#include <string.h>

#include "cpu.h"
#include "dtype.h"
#include "tiermem.h"
#include "workers.h"

namespace {

const uint64_t CHUNK = 1024; // divides TM_NORM_BLOCK and is a multiple of TM_NORM_LANES

struct Store {
    const tm_loops *loops;
    uint64_t n;
    void *dst;
    int dst_dtype;
    const void *src;
    int src_dtype;
    bool is_added;
    uint64_t first_element;
    double *sums;
};

} // namespace

// Leaves in `values` what dst holds after the store (or src, when there is no dst).
static const float *store_chunk(const Store *store, uint64_t begin, uint64_t n, float *values) {
    const void *src = tm_dtype_at(store->src, store->src_dtype, begin);
    tm_dtype_widen(store->loops, store->src_dtype, n, src, values);
    if (!store->dst)
        return values;
    void *dst = tm_dtype_at(store->dst, store->dst_dtype, begin);
    if (store->dst_dtype == store->src_dtype && !store->is_added) { // nothing is rounded
        memmove(dst, src, n * (store->src_dtype == TM_F32 ? 4 : 2));
        return values;
    }
    if (store->is_added) {
        float held[CHUNK];
        tm_dtype_widen(store->loops, store->dst_dtype, n, dst, held);
        store->loops->add(n, held, values, values);
    }
    tm_dtype_narrow(store->loops, store->dst_dtype, n, values, dst);
    if (store->dst_dtype != TM_F32 && store->sums)
        tm_dtype_widen(store->loops, store->dst_dtype, n, dst, values);
    return values;
}

// Adds the squares of elements that start at a lane other than 0 or end before lane 15.
static void add_squares_one_by_one(uint64_t n, const float *x, unsigned lane, double *lanes) {
    for (uint64_t i = 0; i < n; ++i)
        lanes[(lane + i) % TM_NORM_LANES] += (double)x[i] * (double)x[i];
}

static void measure_chunk(const Store *store, uint64_t element, uint64_t n, const float *x, double *lanes) {
    const unsigned lane = element % TM_NORM_LANES;
    uint64_t head = lane == 0 ? 0 : TM_NORM_LANES - lane;
    if (head > n)
        head = n;
    add_squares_one_by_one(head, x, lane, lanes);
    const uint64_t whole = (n - head) / TM_NORM_LANES * TM_NORM_LANES;
    store->loops->add_squares(whole, x + head, lanes);
    add_squares_one_by_one(n - head - whole, x + head + whole, 0, lanes);
}

static void store_task(void *context, uint64_t index) {
    const Store *store = (const Store *)context;
    const uint64_t block = store->first_element / TM_NORM_BLOCK + index;
    const uint64_t last = store->first_element + store->n;
    const uint64_t begin = block * TM_NORM_BLOCK > store->first_element ? block * TM_NORM_BLOCK : store->first_element;
    const uint64_t end = (block + 1) * TM_NORM_BLOCK < last ? (block + 1) * TM_NORM_BLOCK : last;
    double lanes[TM_NORM_LANES] = {0};
    for (uint64_t element = begin; element < end;) {
        const uint64_t n = end - element < CHUNK ? end - element : CHUNK;
        float values[CHUNK];
        const float *x = store_chunk(store, element - store->first_element, n, values);
        if (store->sums)
            measure_chunk(store, element, n, x, lanes);
        element += n;
    }
    if (!store->sums)
        return;
    double sum = 0;
    for (double lane : lanes)
        sum += lane;
    store->sums[index] = sum;
}

int tm_gradient_store(tm_workers *workers, uint64_t n, void *dst, int32_t dst_dtype, const void *src, int32_t src_dtype,
                      int32_t accumulate, uint64_t first_element, double *sums) {
    if (n == 0)
        return 0;
    if (!src || !tm_dtype_is_stored(src_dtype) || (!dst && accumulate) || (dst && !tm_dtype_is_stored(dst_dtype)))
        return -EINVAL;
    if (first_element + n < n)
        return -EINVAL;
    Store store = {tm_loops_chosen(), n, dst, dst_dtype, src, src_dtype, accumulate != 0, first_element, sums};
    const uint64_t num_blocks = (first_element + n - 1) / TM_NORM_BLOCK - first_element / TM_NORM_BLOCK + 1;
    tm_workers_run(workers, num_blocks, store_task, &store);
    return 0;
}
