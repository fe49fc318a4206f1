// blocks: frozen weights as codes with a scale, to and from the dtype of the maths.
//
// A task is a run of whole blocks. Chunks of it pass through fp32 in the first-level cache.

#include <errno.h>
#include <string.h>

#include "cpu.h"
#include "dtype.h"
#include "tiermem.h"
#include "workers.h"

namespace {

const uint64_t TASK = TM_NORM_BLOCK; // a multiple of CHUNK
const uint64_t CHUNK = 1024;         // a multiple of TM_WEIGHT_BLOCK

struct Packing {
    const tm_loops *loops;
    int32_t kind;
    uint64_t n;
    uint8_t *codes;
    float *scales;
    char *values;
    int32_t dtype;
};

} // namespace

static uint64_t code_bytes(const Packing *packing, uint64_t n) { return n * (unsigned)packing->kind / 8; }

static void unpack_chunk(const Packing *all, uint64_t begin, uint64_t n) {
    const uint64_t num_blocks = (n + TM_WEIGHT_BLOCK - 1) / TM_WEIGHT_BLOCK;
    const uint8_t *codes = all->codes + code_bytes(all, begin);
    float values[CHUNK];
    const auto unpack = all->kind == TM_NF4 ? all->loops->unpack_nf4 : all->loops->unpack_int8;
    unpack(num_blocks, codes, all->scales + begin / TM_WEIGHT_BLOCK, values);
    tm_dtype_narrow(all->loops, all->dtype, n, values, tm_dtype_at((void *)all->values, all->dtype, begin));
}

static void pack_chunk(const Packing *all, uint64_t begin, uint64_t n) {
    const uint64_t num_blocks = (n + TM_WEIGHT_BLOCK - 1) / TM_WEIGHT_BLOCK;
    float values[CHUNK];
    tm_dtype_widen(all->loops, all->dtype, n, tm_dtype_at((const void *)all->values, all->dtype, begin), values);
    memset(values + n, 0, (num_blocks * TM_WEIGHT_BLOCK - n) * sizeof(float));
    const auto pack = all->kind == TM_NF4 ? all->loops->pack_nf4 : all->loops->pack_int8;
    pack(num_blocks, values, all->codes + code_bytes(all, begin), all->scales + begin / TM_WEIGHT_BLOCK);
}

template <void (*do_chunk)(const Packing *, uint64_t, uint64_t)> static void run_task(void *context, uint64_t index) {
    const Packing *all = (const Packing *)context;
    const uint64_t end = all->n - index * TASK < TASK ? all->n : (index + 1) * TASK;
    for (uint64_t begin = index * TASK; begin < end; begin += CHUNK)
        do_chunk(all, begin, end - begin < CHUNK ? end - begin : CHUNK);
}

static int run(tm_workers *workers, tm_task task, Packing packing) {
    if (packing.kind != TM_INT8 && packing.kind != TM_NF4)
        return -EINVAL;
    if (packing.n == 0)
        return 0;
    if (!packing.codes || !packing.scales || !packing.values || !tm_dtype_is_stored(packing.dtype))
        return -EINVAL;
    packing.loops = tm_loops_chosen();
    tm_workers_run(workers, (packing.n - 1) / TASK + 1, task, &packing);
    return 0;
}

int tm_blocks_unpack(tm_workers *workers, int32_t kind, uint64_t n, const void *codes, const float *scales,
                     void *values, int32_t dtype) {
    return run(workers, run_task<unpack_chunk>,
               {nullptr, kind, n, (uint8_t *)codes, (float *)scales, (char *)values, dtype});
}

int tm_blocks_pack(tm_workers *workers, int32_t kind, uint64_t n, const void *values, int32_t dtype, void *codes,
                   float *scales) {
    return run(workers, run_task<pack_chunk>, {nullptr, kind, n, (uint8_t *)codes, scales, (char *)values, dtype});
}
