/* tiermem.h: the one header of floor 0, and its manual.
 *
 * Bytes and arithmetic: memory that is mapped once, a queue that moves blocks between memory and
 * files, kernels that step optimizer states. Nothing here knows a tensor, a Python object or CUDA.
 * Nothing prints, exits, aborts or calls back. Every int returned is >= 0 or -errno.
 *
 *   system   tm_file_alignment · tm_heap_trim
 *   map      tm_map_open · tm_map_nan · tm_map_bind · tm_map_commit · tm_map_release · tm_map_close
 *   queue    tm_queue_open · _submit · _wait · _promote · _cancel · _counters · _latencies · _close
 *   workers  tm_workers_open · _pin · _close            threads that the kernels share
 *   kernels  tm_optimizer_step · tm_part_widen · tm_part_narrow · tm_blocks_unpack · tm_blocks_pack · tm_gradient_store
 *            tm_isa_choose
 *   checksum tm_crc32c · tm_crc32c_combine · tm_crc32c_join
 *   program  tm_program_open · _begin · _run · _add · _next · _done · _wait · _await · _take · _forget · _quiet · _stop
 *            tm_program_report · _under_way · _close
 *
 * The Python binding is generated from the part between the two BINDING lines; it holds plain
 * declarations only.
 */
#ifndef TIERMEM_H
#define TIERMEM_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* BINDING BEGINS */

/* ---- map: address space for one arena ---------------------------------------------------- */

/* Reserves `bytes` of address space (rounded up to 2 MiB, aligned to 2 MiB, huge pages asked for,
 * not inherited by a forked child). No page is resident until it is committed or touched. */
int tm_map_open(uint64_t bytes, void **base);

/* Pages of [address, address + bytes) that become resident from now on lie on memory node `node` as long as it has free
 * ones; pages that are resident stay where they are. Address and bytes are multiples of the page size. -EINVAL also for
 * a node that is not there; -ENOSYS or -EPERM where the kernel does not allow it. Does not block. */
int tm_map_bind(void *address, uint64_t bytes, int32_t node);

/* Makes [address, address + bytes) resident (written zeros for pages never touched). Pages already
 * resident keep their content. Address and bytes are multiples of the page size. Blocks; more than 32 MiB are shared by
 * threads on all cores of this process, which end with the call. */
int tm_map_commit(void *address, uint64_t bytes);

/* Gives the pages of [address, address + bytes) back to the kernel; their content is lost. Never inside
 * a region registered with an open queue: the queue would go on with the pages that were given back. */
int tm_map_release(void *address, uint64_t bytes);

/* Maps `bytes`, rounded and aligned as tm_map_open does, in which every 16-bit word is 0x7fff: NaN in each format of
 * floating-point numbers. All of them share a few pages; a page that is written becomes the process's own. A forked
 * child inherits them. */
int tm_map_nan(uint64_t bytes, void **base);

/* Unmaps what tm_map_open or tm_map_nan gave; no queue may still use it. `bytes` is what was asked. */
int tm_map_close(void *base, uint64_t bytes);

/* ---- system ------------------------------------------------------------------------------- */

/* What O_DIRECT asks of this file (statx STATX_DIOALIGN): alignment of memory and of offsets and
 * lengths, in bytes; both 0 when the file does not take O_DIRECT. -ENOSYS: the kernel does not say. */
int tm_file_alignment(int32_t fd, uint32_t *memory, uint32_t *offset);

/* Gives freed heap memory back to the kernel, holes included (glibc; elsewhere does nothing). Returns
 * 1 when there was some. */
int tm_heap_trim(void);

/* ---- queue: blocks on their way between memory and files ----------------------------------- */

typedef struct tm_queue tm_queue;

enum tm_engine {
    TM_ENGINE_AUTO = 0, /* tries the others in their order */
    TM_ENGINE_URING = 1,
    TM_ENGINE_AIO = 2,
    TM_ENGINE_THREADS = 3,
    TM_NUM_ENGINES /* AUTO among them */
};
enum tm_kind { TM_READ = 0, TM_WRITE = 1, TM_SYNC = 2 };
/* TM_SYNC: fdatasync of fd; buffer, length and offset are not looked at. It is not ordered against other
 * operations: it makes durable the writes that were answered before it was submitted. */
enum tm_priority { TM_URGENT = 0, TM_NORMAL = 1, TM_BACKGROUND = 2 };

/* A rule of the fault-injecting engine: applied to the block with that serial number (counted from
 * 0 in the order blocks reach the engine), `repeat` blocks in a row (0 means one). */
enum tm_fault_kind {
    TM_FAULT_ERROR = 0,  /* the block completes with -value (an errno: EIO, ENOSPC, EINTR, ...) */
    TM_FAULT_SHORT = 1,  /* only `value` bytes are transferred; the engine reports that count */
    TM_FAULT_LATE = 2,   /* the completion is held back until `value` later blocks completed */
    TM_FAULT_REFUSED = 3 /* submission answers -EAGAIN for this block, `repeat` times */
};
typedef struct tm_fault {
    uint64_t serial;
    uint64_t value;
    int32_t kind;
    uint32_t repeat;
} tm_fault;

enum tm_queue_flag {
    TM_QUEUE_SINGLE_SUBMIT = 1, /* each block is handed to the kernel by a system call of its own, instead of
                                   all that are ready by one */
    TM_QUEUE_NO_OVERLAP = 2     /* waves: new blocks are cut only when none is in flight, instead of whenever
                                   one of `depth` ended */
};

typedef struct tm_queue_options {
    int32_t engine;       /* enum tm_engine */
    uint32_t depth;       /* blocks in flight, 1..4096 */
    uint32_t threads;     /* of the threads engine; 0: min(depth, 8) */
    uint32_t num_regions; /* memory ranges to register with the kernel, if it allows (io_uring): this
                             makes them resident and pins them until the queue is closed */
    uint64_t block_bytes; /* a transfer is split into blocks of this size (multiple of 4096) */
    void *const *regions; /* starts of the ranges; may be NULL when num_regions is 0 */
    const uint64_t *region_bytes;
    const tm_fault *faults; /* rules for the fault-injecting engine, wrapped round the chosen one */
    uint32_t num_faults;
    uint32_t flags;       /* enum tm_queue_flag, or-ed */
    const int32_t *files; /* descriptors to register with the kernel, if it allows (io_uring); they stay open until
                             the queue is closed. Others may be used as well. NULL when num_files is 0. With one that
                             lies on FUSE io_uring is refused (EOPNOTSUPP): short transfers there it finishes at the
                             wrong place, so name such files here */
    uint32_t num_files;
    uint32_t reserved;
} tm_queue_options;

/* One transfer. Several operations may carry one tag: the tag is answered when all have ended. */
typedef struct tm_op {
    void *buffer; /* aligned as the file demands; belongs to the queue until the tag is answered */
    uint64_t length;
    uint64_t offset;
    uint64_t tag; /* chosen by the caller; unique among tags not yet answered to a wait */
    int32_t fd;
    int32_t kind;
    int32_t priority;
    int32_t reserved;
} tm_op;

/* What became of a tag. On error: the first block that failed (fd, kind, offset, length). */
typedef struct tm_answer {
    int32_t error; /* 0, or a positive errno; ENODATA: the file ended before the read did */
    int32_t fd;
    int32_t kind;
    int32_t reserved;
    uint64_t offset;
    uint64_t length;
    uint64_t bytes;       /* transferred for this tag in all, every byte counted once */
    int64_t submitted_ns; /* CLOCK_MONOTONIC: given to tm_queue_submit */
    int64_t started_ns;   /* first block given to the kernel (0: none was) */
    int64_t finished_ns;  /* last block ended */
} tm_answer;

typedef struct tm_counters {
    uint64_t read_bytes; /* transferred, as the kernel's completions say */
    uint64_t written_bytes;
    uint64_t blocks;         /* completed */
    uint64_t resumed;        /* remainders re-queued after a short transfer, EINTR or EAGAIN */
    uint64_t kernel_entries; /* system calls of the engine */
    int64_t busy_ns;         /* time with at least one block in flight, until its end is looked at */
    int64_t wanted_ns;       /* time with at least one tag not yet answered: the disk stood idle for
                                wanted_ns - busy_ns of it while something was to be done */
    int64_t cpu_ns;          /* CPU time, user and system, of the queue's thread and of the threads engine's; what the
                                kernel does in threads of its own is not in it */
} tm_counters;

/* Buckets of latencies: 16 to every doubling from 1.024 microseconds up, and 16 of 64 ns below. The last one begins
 * at 66.6 s and has no end. */
enum tm_latency { TM_LATENCY_BUCKETS = 432 };

/* Opens a queue with its own native thread. `*engine` receives the engine in use; `why` (of
 * why_bytes, always terminated) receives one line that says which was chosen and why others were
 * not, and what was registered. A named engine that cannot run is an error, with `why` filled. */
int tm_queue_open(const tm_queue_options *options, tm_queue **queue, int32_t *engine, char *why, uint32_t why_bytes);

/* Takes n operations: never waits for I/O, may be called from any thread. Either all are taken or
 * none (-EINVAL: a malformed one; -EEXIST: a tag of an earlier call not yet waited for; -ESHUTDOWN:
 * closing; -EPIPE: this process is a fork of the one that opened the queue; -ENOMEM). Malformed is also
 * a length of 0. After a failure of the engine itself (never seen) every tag ends in that errno, and so
 * does this. */
int tm_queue_submit(tm_queue *queue, const tm_op *ops, uint32_t n);

/* Blocks until this tag is answered, at most timeout_ns (negative: for ever; 0: a look). Returns 0
 * and fills *answer (the tag is then forgotten), -ETIMEDOUT, or -ENOENT for a tag not known. Raises
 * the tag to TM_URGENT first, unless timeout_ns is 0. All bytes or an error; never a part. */
int tm_queue_wait(tm_queue *queue, uint64_t tag, int64_t timeout_ns, tm_answer *answer);

/* Moves the tag's blocks that are not yet with the kernel to a higher priority. -ENOENT if unknown. */
int tm_queue_promote(tm_queue *queue, uint64_t tag, int32_t priority);

/* Drops the tag's blocks that are not yet with the kernel; those in flight end by themselves. The
 * tag must still be waited for: its answer is ECANCELED if anything was dropped. */
int tm_queue_cancel(tm_queue *queue, uint64_t tag);

int tm_queue_counters(tm_queue *queue, tm_counters *counters);

/* How long blocks took: counts[i] is how many took tm_latency_floor_ns(i) or longer, but less than that of i + 1.
 * A block is one that was transferred in full, of the kind TM_READ or TM_WRITE, since the queue was opened; its time
 * runs from when it is cut to be handed to the engine until its completion is looked at, remainders included.
 * counts has room for TM_LATENCY_BUCKETS. -EINVAL: another kind. */
int tm_queue_latencies(tm_queue *queue, int32_t kind, uint64_t *counts);

/* bucket < 16: 64 * bucket; else with octave = bucket / 16 - 1: (16 + bucket % 16) * 2^octave * 64. From
 * TM_LATENCY_BUCKETS on it is that of TM_LATENCY_BUCKETS. */
int64_t tm_latency_floor_ns(uint32_t bucket);

/* Finishes what was submitted, stops the thread and frees the queue. Unanswered tags are forgotten.
 * Returns the number of tags that ended in an error (ECANCELED aside) nobody waited for, or -EPIPE in a fork (where
 * nothing is touched). */
int tm_queue_close(tm_queue *queue);

/* ---- workers: threads that kernels share --------------------------------------------------- */

typedef struct tm_workers tm_workers;

/* num_threads includes the caller of a kernel: 1 starts none. */
int tm_workers_open(uint32_t num_threads, tm_workers **workers);
int tm_workers_close(tm_workers *workers);

/* From the next kernel on every worker stays on one of these cores, no two on the same, and none on the core that the
 * kernel's caller is on: woken there it would wait for the caller instead of helping. The caller itself goes where it
 * likes. num_cores is num_threads at least, else -EINVAL; so is a core that this process may not use. -ENOTSUP: no
 * Linux. Not while a kernel runs. */
int tm_workers_pin(tm_workers *workers, const int32_t *cores, uint32_t num_cores);

/* ---- kernels -------------------------------------------------------------------------------- */

enum tm_dtype {
    TM_NONE = 0,
    TM_F32 = 1,
    TM_BF16 = 2,
    TM_F16 = 3,
    TM_SPLIT = 4,      /* a master: the 16 bits that an fp32 number lacks beside its bf16 weight */
    TM_Q8 = 5,         /* a moment of either sign in 8 bits, 64 of them sharing an exponent */
    TM_Q8_POSITIVE = 6 /* the same for one that is never negative */
};

/* The instruction set used from now on by all kernels of this process. `isa` < 0: the best that this CPU has and the
 * environment variable ATEN_CPU_CAPABILITY ("default": 0, "avx2": 1; read once more at each such call) allows, as
 * before the first call. Returns the one in force (0 plain C, 1 AVX2, 2 AVX-512), or -ENOTSUP. Same bits from each. */
int tm_isa_choose(int32_t isa);
const char *tm_isa_name(int32_t isa);

/* One optimizer step.
 *
 *     weight    what the model sees: bf16, fp16, fp32; NONE: nobody needs it here (master is then fp32)
 *     master    fp32, SPLIT (weight is then bf16), or NONE: the weight is the master
 *     grad      fp32, bf16, fp16; only read
 *     moments   fp32, bf16, fp16, 8-bit, each for itself; NONE where the rule has none, or it is optional:
 *                   ADAMW, ADAM   m (Q8), v (Q8_POSITIVE), optionally the largest v (Q8_POSITIVE): amsgrad
 *                   ADAGRAD       sum (Q8_POSITIVE)
 *                   LION          m (Q8)
 *                   SGD           optionally the momentum (Q8)
 *
 * SPLIT keeps an fp32 number x of pattern b as the weight (b + 0x8000) >> 16, modulo 2^16, and b & 0xffff: 16 bits
 * each. b is had back from the two, whatever it is: upper = weight - (low >= 0x8000). The weight is x rounded to the
 * nearest bf16, ties away from zero; a finite x within half a unit of the largest bf16 (|x| >= 0x7f7f8000) shows
 * as infinity, as it does when rounding to even, and is still x. A NaN that the step makes or meets is stored
 * as 0x7fc00000, since the weight of some NaN patterns (0x7fff8000 and up, GPUs' own among them) reads as 0.
 *
 * 8-bit moments have one byte per element, and one scale byte per TM_Q8_BLOCK elements counted from the first of
 * this call: tiles start at multiples of it; the last block may be short. A block that holds NaN or infinity is
 * NaN as a whole. loops_q8.h draws the code. */
enum tm_rule { TM_ADAMW = 0, TM_ADAM = 1, TM_ADAGRAD = 2, TM_LION = 3, TM_SGD = 4 };
enum tm_rounding { TM_NEAREST = 0, TM_STOCHASTIC = 1 };
enum tm_q8 { TM_Q8_BLOCK = 64 };
enum tm_step_flags {
    TM_STEP_START_MOMENTS = 1, /* moments start at zero (ADAGRAD: at scalars.initial) without being read */
    TM_STEP_START_MASTER = 2,  /* the master starts from the weight without being read */
    TM_STEP_START = 3,         /* both */
    TM_STEP_MAXIMIZE = 4,      /* along the gradient instead of against it */
    TM_STEP_NESTEROV = 8,      /* SGD with momentum */
    TM_STEP_UNFUSED = 16       /* for tests: not the loops made for one combination of dtypes. The same bits */
};

typedef struct tm_part {
    void *data;      /* aligned to its element */
    uint8_t *scales; /* 8-bit moments: one for each TM_Q8_BLOCK elements */
    int32_t dtype;   /* enum tm_dtype */
    int32_t reserved;
} tm_part;

/* Rounded to fp32 once; 1 - beta and 1 - dampening are computed in double first. */
typedef struct tm_step_scalars {
    double step_size;      /* ADAM, ADAMW: lr / (1 - beta1^t); ADAGRAD: lr / (1 + (t - 1) * lr_decay); else lr */
    double decay;          /* ADAMW, LION (decoupled): 1 - lr * weight_decay; else (L2): weight_decay */
    double grad_scale;     /* multiplies the gradient first: 1 / loss scale * clip factor */
    double beta1;          /* ADAM, ADAMW, LION */
    double beta2;          /* the same */
    double eps;            /* ADAM, ADAMW, ADAGRAD */
    double inv_sqrt_bias2; /* ADAM, ADAMW: 1 / sqrt(1 - beta2^t) */
    double momentum;       /* SGD */
    double dampening;      /* SGD */
    double initial;        /* ADAGRAD: where the sum starts */
} tm_step_scalars;

/* What changes from one step of a parameter to the next. All of its tiles point at one. */
typedef struct tm_step_numbers {
    uint64_t step; /* number of this step */
    tm_step_scalars scalars;
} tm_step_numbers;

typedef struct tm_step {
    uint64_t n;
    tm_part weight;
    tm_part master;
    tm_part grad;
    tm_part moments[3];
    uint64_t key;           /* of stochastic rounding: the seed mixed with a hash of the parameter's full name */
    uint64_t first_element; /* where this call's elements lie in the whole parameter */
    int32_t rule;
    int32_t rounding; /* of every part below fp32 that is state: moments, and the weight when it is the master */
    uint32_t flags;
    uint32_t reserved;
    const tm_step_numbers *numbers;
    /* A step beside what it replaces: where the weight, the master and the moments are read, in the format in which
     * they are written. NULL: where they are written. Does not overlap what is written. */
    const void *sources[5];
    const uint8_t *source_scales[5]; /* of 8-bit moments */
} tm_step;

/* One pass over memory, fp32 arithmetic, no FMA, true division and square root, in this order per element:
 *
 *     all       g = float(grad) * grad_scale                  (MAXIMIZE: * -grad_scale)
 *               p = float(master)
 *     ADAMW     p = p * decay                                 (ADAM: g = g + decay * p)
 *               m = m + (g - m) * (1 - beta1)
 *               v = v * beta2 + (g * g) * (1 - beta2)
 *               w = v                                         (amsgrad: w = largest = max(largest, v))
 *               p = p - step_size * (m / (sqrt(w) * inv_sqrt_bias2 + eps))
 *     ADAGRAD   g = g + decay * p
 *               sum = sum + g * g
 *               p = p - step_size * (g / (sqrt(sum) + eps))
 *     LION      p = p * decay - step_size * sign(m * beta1 + g * (1 - beta1))
 *               m = m * beta2 + g * (1 - beta2)
 *     SGD       g = g + decay * p
 *               m = m * momentum + g * (1 - dampening)        (START_MOMENTS: m = g)
 *               p = p - step_size * (m, NESTEROV: g + momentum * m, no moment: g)
 *
 * Then every part is stored: moments and master as `rounding` says, a weight beside its master to nearest even.
 * What was rounded is not used again in the same step.
 *
 * Stochastic rounding depends on key, step, the part and the element's number in the whole parameter alone, so
 * tiles, threads, ranks and instruction sets do not change a bit. It is unbiased, keeps zeros, infinities and signs,
 * and rounds to infinity only what nearest would. A NaN stays one; which one is not promised (SPLIT above). Parts do
 * not overlap. Streams should not lie a large power of two (seen from 32 MiB on) apart: on AMD they evict each
 * other from the first-level cache, and any kernel is several times slower. -EINVAL: a combination that the table
 * above does not hold, or a missing pointer. Blocks. Sources: Kingma & Ba 2015; Loshchilov & Hutter 2019; Reddi et al.
 * 2018 (amsgrad); Duchi et al. 2011; Chen et al. 2023 (Lion); Sutskever et al. 2013, in the variant of torch.optim.SGD.
 */
int tm_optimizer_step(tm_workers *workers, const tm_step *step);

/* values[i] = float(part[i]). A SPLIT part is read with its bf16 weight beside; for others `weight` is not looked at.
 * -EINVAL as above. Exact. Blocks. */
int tm_part_widen(tm_workers *workers, uint64_t n, const tm_part *part, const void *weight, float *values);

/* part[i] = values[i] rounded to nearest even; SPLIT writes its bf16 weight too, and keeps every pattern. */
int tm_part_narrow(tm_workers *workers, uint64_t n, const float *values, const tm_part *part, void *weight);

/* Frozen weights in blocks of TM_WEIGHT_BLOCK, each with an fp32 scale. The value of a kind is the bits of a code.
 *
 *     INT8    an int8: value = code * scale                           the largest size in the block is 127 scales
 *     NF4     the number of one of 16 levels: value = level * scale   the largest size in the block is the scale
 *
 * loops_blocks.h has the levels and the order of the codes. The last block is padded: `codes` holds whole blocks. */
enum tm_blocks { TM_NF4 = 4, TM_INT8 = 8, TM_WEIGHT_BLOCK = 64 };

/* values[i] = the value of element i, computed in fp32 and rounded once to `dtype`: fp32, bf16 or fp16. -EINVAL:
 * another kind or dtype, or a missing pointer. Blocks. */
int tm_blocks_unpack(tm_workers *workers, int32_t kind, uint64_t n, const void *codes, const float *scales,
                     void *values, int32_t dtype);

/* The codes and scales of `values`; the elements that pad the last block are 0. As above. */
int tm_blocks_pack(tm_workers *workers, int32_t kind, uint64_t n, const void *values, int32_t dtype, void *codes,
                   float *scales);

/* Elements of one block of a norm: blocks are cut at multiples of this, counted from element 0 of
 * the whole parameter. */
enum tm_norm { TM_NORM_BLOCK = 65536 };

/* dst = float-rounded(src), or dst = dst + src (sum in fp32, rounded once to dst's dtype) when
 * accumulate is 1; dst may be NULL to only measure src. Then, over what dst now holds (or src), the
 * sum of squares of each norm block in float64: sums[0] belongs to the block that holds element
 * first_element of the parameter, and so on; there are
 * (first_element + n - 1) / TM_NORM_BLOCK - first_element / TM_NORM_BLOCK + 1 of them. Within a block
 * the elements are added in 16 interleaved lanes (by element offset mod 16), the lanes then in order:
 * the same bits for every ISA and number of threads. A sum is finite if and only if every element
 * is. `sums` may be NULL. src and dst may be the same memory when their dtypes are equal. */
int tm_gradient_store(tm_workers *workers, uint64_t n, void *dst, int32_t dst_dtype, const void *src, int32_t src_dtype,
                      int32_t accumulate, uint64_t first_element, double *sums);

/* ---- checksum: CRC-32C -------------------------------------------------------------------------- */

/* crcs[i] = the CRC-32C (iSCSI, RFC 3720: Castagnoli's polynomial, inverted before and behind) of bytes[i] bytes at
 * pieces[i]; 0 for a piece of no bytes, whose address is not looked at. Any alignment. The pieces are shared among the
 * threads, a large one in parts. By the processor's own instructions where it has any (x86: AVX-512 with VPCLMULQDQ,
 * SSE4.2; ARMv8: CRC), else by tables; tm_isa_choose does not change that, and all give the same. -EINVAL: a missing
 * pointer; -ENOMEM. Blocks. */
int tm_crc32c(tm_workers *workers, uint64_t n, const void *const *pieces, const uint64_t *bytes, uint32_t *crcs);

/* The CRC-32C of A and B behind it, from those of A and of B, which is b_bytes long. Takes about a microsecond. */
uint32_t tm_crc32c_combine(uint32_t a, uint32_t b, uint64_t b_bytes);

/* joined[i] = the CRC-32C of the messages first[i] to first[i + 1] - 1 behind one another, from the CRC-32C and the
 * length of each; 0 for none. `first` holds n + 1 numbers, ascending. -EINVAL: a missing pointer, numbers that descend.
 */
int tm_crc32c_join(uint64_t n, const uint64_t *first, const uint32_t *crcs, const uint64_t *bytes, uint32_t *joined);

/* ---- slots: who may write and read a tile's bytes while a run is under way -------------------------- */

/* A tile's bytes rest in one of several slots of a file. Transfers name places, so the program knows no slots: its
 * caller chooses them, under a lock of its own.
 *
 *     caller                             program                              any other reader
 *     choose: reads `current`, writes    .                                    reads `current`, compares the table
 *       a slot that is neither held      .                                    .
 *       nor, of a write apart, current   .                                    .
 *     run, add: copies transfers ------> reads `current`, compares the table  the same
 *       .                                steps, sums: into the table, or      the same; of a write apart: the old
 *       .                                  of a write apart beside it           bytes, with the old checksums
 *       .                                writes the slot                      .
 *     wait, report <-------------------- ended                                .
 *     note: the slot becomes             .                                    .
 *       `current`, with its checksums    .                                    reads the new slot, with its checksums
 *     or drop: stop, and no note         writes ended, or never begun         reads the old slot, as ever
 *
 * From choose to note or drop nothing else writes the tile, and its slots do not move. A freeze holds the slot that is
 * current when it begins: no later choice takes it, until the thaw. A write in place (the current slot, held by none)
 * has no other reader: readers ask tm_program_take first. After a write that failed the bytes of its slot are lost
 * until they are written again; no freeze takes them. */

/* ---- program: an optimizer step over tiles that are read, checked, stepped, summed and written -------- */

/* A program steps tiles through a fixed number of buffers. It has a thread of its own, which starts transfers in queues
 * and runs kernels. A tile goes through
 *
 *     waiting -> reading -> checked -> stepped -> summed -> writing -> ended
 *                              |          ^
 *                              +- called -+        a caller of tm_program_next does the work, or brings what it needs
 *
 *     read     as many tiles ahead as buffers are free, by their turns; tiles of an urgent unit first
 *     check    compares CRC-32Cs of what was read, but for bytes from cached memory; a difference ends the run
 *     step     one tile at a time, the first in order that has been read, urgent ones first: tm_optimizer_step for
 *              each of its parts; then its weights are copied to where tm_program_take asked for them
 *     sum      stores the CRC-32Cs of what is about to be written
 *     write    in the background of the next tiles; its end frees the buffer
 *
 * Check, step and sum are one pass over memory where every part that the steps change lies in the tile's buffer: each
 * chunk that a core's cache keeps is summed, stepped and summed again. After a difference the buffer holds a step that
 * nobody takes. Where a step changes other memory, the check comes first, and after a difference nothing is stepped.
 * Work of callers lies between a check and a sum of their own.
 *
 * A tile without flags whose columns are given goes this way in strips, each in a part of a buffer, unless the run has
 * one read or one write: few buffers are then in use, and what is under way stays in a processor's cache.
 * Its columns hold all that it reads and writes, and each piece lies in one strip. The tile is stepped, and has ended,
 * when all of its strips are. A difference ends the run before its own strip is stepped; others may be written.
 *
 * The transfers of one tile never overlap each other; two tiles of a run share no byte. Each address that lies in the
 * first buffer means the same place in the buffer that the tile gets. A tile without transfers needs no buffer, unless
 * a caller brings bytes to it.
 *
 * After a failure no further tile is read or stepped, reads under way are cancelled, and writes end. The first failure
 * is kept. A failure of a tile says nothing about tiles that have ended. */
typedef struct tm_program tm_program;

typedef struct tm_transfer {
    tm_queue *queue; /* stays open until the run, or the reads of tm_program_begin, have ended */
    void *buffer;
    uint64_t length;
    uint64_t offset;
    const void *cached; /* of a read: memory that has the same bytes until tm_program_forget; NULL: there is none */
    int32_t fd;
    int32_t reserved;
} tm_transfer;

/* Bytes with a checksum. To check: they have *crc, unless *is_known is 0 when the tile gets its buffer. To sum: *crc
 * becomes theirs, and *is_known 1. One table of checksums may be both: a tile's are compared before they are stored. */
typedef struct tm_piece {
    void *data;
    uint64_t bytes;
    uint32_t *crc;
    uint8_t *is_known; /* NULL: known */
} tm_piece;

/* A state of a tile's elements, their weights or their gradients, one element behind the other in the first buffer. A
 * strip is a range of elements through all columns: so many bytes of each, the last strip may have less. */
typedef struct tm_column {
    void *data;
    uint64_t bytes;
    uint64_t strip_bytes;
} tm_column;

enum tm_tile_flag {
    TM_TILE_CALLED = 1, /* its work is done by a caller of tm_program_next; steps are then not looked at */
    TM_TILE_BEGUN = 2,  /* tm_program_begin has been given its reads and checks; those given now come in addition */
    TM_TILE_BROUGHT = 4 /* a caller of tm_program_next brings what else its steps read; they follow. It has a buffer */
};

typedef struct tm_tile {
    uint64_t key;  /* the same in tm_program_begin and tm_program_run; unique among the tiles of a run */
    uint32_t unit; /* whom it belongs to, for tm_program_wait */
    uint32_t flags;
    uint32_t num_reads;
    uint32_t num_checks;
    uint32_t num_steps;
    uint32_t num_sums;
    uint32_t num_writes;
    uint32_t turn; /* a tile gets its buffer before those of later turns, and after those of its own given before it */
    const tm_transfer *reads;
    const tm_piece *checks;
    const tm_step *const *steps;
    const tm_piece *sums;
    const tm_transfer *writes;
    void *weights; /* what tm_program_take copies; NULL: nothing */
    uint64_t weight_bytes;
    const tm_column *columns; /* NULL: the tile is not stepped in strips */
    uint64_t num_columns;
} tm_tile;

enum tm_run_flag {
    TM_RUN_ONE_READ = 1,  /* a tile is read when the one before it has been stepped, instead of ahead */
    TM_RUN_ONE_WRITE = 2, /* a tile is stepped when the one before it has been written */
    TM_RUN_AWAITED = 4    /* a caller does nothing but wait: what the run waits for is urgent in its queue */
};

enum tm_during { TM_DURING_READ = 0, TM_DURING_CHECK = 1, TM_DURING_STEP = 2, TM_DURING_WRITE = 3 };

typedef struct tm_failure {
    int32_t error;  /* 0: none; else a positive errno. EBADMSG: bytes that were read differ from their checksum */
    int32_t during; /* enum tm_during */
    int32_t fd;     /* of a failed transfer: its first block that failed */
    int32_t kind;
    uint64_t offset;
    uint64_t length;
    uint64_t tile;  /* index in the run */
    uint64_t piece; /* the first that differs, counted through what tm_program_begin and tm_program_run were given */
    uint32_t seen;  /* its checksum */
    uint32_t num_wrong; /* pieces of this tile, or strip, that differ */
} tm_failure;

/* What became of a tile. CLOCK_MONOTONIC nanoseconds; 0: it did not come to that. Of several strips: transfers from the
 * first to the end of the last; work and waiting as long as all of it together, up to the end of the last. */
typedef struct tm_tile_times {
    int64_t begun_ns[2];  /* the transfers of tm_program_begin: from the first block to the end of the last one */
    int64_t read_ns[2];   /* those of tm_program_run */
    int64_t waited_ns[2]; /* while the program had nothing to do but to wait for this tile's reads */
    int64_t check_ns[2];  /* apart from the step */
    int64_t step_ns[2];   /* of kernels, with the checks and sums of the same pass; or of the caller's work */
    int64_t sum_ns[2];    /* apart from the step */
    int64_t write_ns[2];
    uint64_t read_bytes;
    uint64_t written_bytes; /* less than given: a write failed */
    int32_t is_writing;     /* its write has been started */
    int32_t is_ended;       /* stepped, and written if it had anything to write */
} tm_tile_times;

/* Starts the program's thread. `workers` (may be NULL) are shared with other kernels and outlive the program. Strips of
 * at most `least_bytes` are under way at first, or one strip; runs find out whether more and larger ones are faster. */
int tm_program_open(tm_workers *workers, uint64_t least_bytes, tm_program **program);

/* Starts to read tiles at TM_BACKGROUND, as many as there are buffers, before it is known how they are stepped. Only
 * reads, checks and keys are looked at, and copied. -EBUSY: a run or an earlier begin is under way. */
int tm_program_begin(tm_program *program, void *const *buffers, uint32_t num_buffers, uint64_t buffer_bytes,
                     const tm_tile *tiles, uint32_t n);

/* Starts a run of `total` tiles with the first n of them, and returns; everything given is copied, the numbers of steps
 * included. Continues an earlier
 * begin: each tile of it is among these n, with TM_TILE_BEGUN, and the buffers are the same. `priority` is that of
 * reads; writes are at TM_BACKGROUND. Memory that is pointed at (buffers, parts, checksums) stays until the run has
 * ended. -EBUSY: a run is under way; -EINVAL; -ENOMEM; -ENOBUFS: tiles need buffers and none is given. */
int tm_program_run(tm_program *program, void *const *buffers, uint32_t num_buffers, uint64_t buffer_bytes,
                   const tm_tile *tiles, uint32_t n, uint32_t total, int32_t priority, uint32_t flags);

/* Gives the run n more tiles while the earlier ones are stepped; it ends when `total` have ended. 1: the run has ended
 * already, and they are dropped. Errors as above; the run then waits for others, or for tm_program_stop. */
int tm_program_add(tm_program *program, const tm_tile *tiles, uint32_t n);

/* Waits for a tile with TM_TILE_CALLED or TM_TILE_BROUGHT, at most timeout_ns (negative: for ever). 0: *tile (its
 * index) and *buffer (the index of its buffer; -1: it has none) are the caller's until tm_program_done. 1: the run has
 * ended. -ETIMEDOUT.
 */
int tm_program_next(tm_program *program, int64_t timeout_ns, uint64_t *tile, int32_t *buffer);

/* Ends the work on a tile of tm_program_next. `error`: 0, or a positive errno; then the run ends as after a failure. */
int tm_program_done(tm_program *program, uint64_t tile, int32_t error);

/* Waits until every tile of a unit has been stepped, or with is_written has ended; unit < 0: every tile of the run.
 * Makes the unit urgent unless timeout_ns is 0. 0: so it is, or the run has no such tile; 1: the run has ended before;
 * -ETIMEDOUT. */
int tm_program_wait(tm_program *program, int64_t unit, int32_t is_written, int64_t timeout_ns);

/* The same for one tile of the run, until it has been stepped. Makes all of its unit urgent unless timeout_ns is 0. */
int tm_program_await(tm_program *program, uint64_t tile, int64_t timeout_ns);

/* Asks for a copy of a tile's new weights at `to` (weight_bytes of it), made when the tile is stepped, or at once while
 * its buffer holds them. 1: it is or will be made, unless the run ends before; tm_program_wait tells when. 0: the
 * buffer is in other use already, and the write has ended. Blocks while that is so of a strip, and not of all. NULL:
 * takes the request back; on return nothing is copied to it any more. */
int tm_program_take(tm_program *program, uint64_t tile, void *to);

/* The memory behind `cached` is about to change, for all tiles of a unit. On return nothing reads it any more: what
 * has not been copied by then is read from the file. */
int tm_program_forget(tm_program *program, uint32_t unit);

/* Waits until no transfer of the program is in a queue: of a run until it has ended, or until the tiles that it has
 * been given have; of begun tiles until they are read. */
int tm_program_quiet(tm_program *program);

/* Ends a run early, as after a failure but without one, or drops what tm_program_begin has begun. Waits for the end. */
int tm_program_stop(tm_program *program);

/* Copies what became of the n tiles that the last run was given, and its failure. -EBUSY while it runs, unless `times`
 * is NULL: then *failure alone is copied. Returns the number of these tiles. */
int tm_program_report(tm_program *program, tm_tile_times *times, uint64_t n, tm_failure *failure);

/* Sets *bytes to those of strips that may be under way now, as far as buffers of the last run hold them. */
int tm_program_under_way(tm_program *program, uint64_t *bytes);

/* Stops, and ends the thread. -EPIPE in a fork, where nothing is touched. */
int tm_program_close(tm_program *program);

/* BINDING ENDS */

#ifdef __cplusplus
}
#endif

#endif /* TIERMEM_H */
