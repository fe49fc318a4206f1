// engine_aio: blocks go through Linux native AIO (io_submit, io_getevents).
//
// The wake-up is an eventfd with a poll always waiting in the context, so one io_getevents sleeps for
// everything. Files not opened with O_DIRECT are transferred inside io_submit: right, only slower.
// The system calls are libaio's, linked statically; without it the engine answers -ENOSYS.

#include <atomic>
#include <errno.h>
#include <new>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include <vector>

#include "engine.h"

#ifdef TIERMEM_HAVE_AIO
#include <libaio.h>

namespace {

struct Aio {
    explicit Aio(uint32_t depth) : blocks(depth), pending(depth + 1), events(depth + 1) {}
    io_context_t context = nullptr;
    int wake_fd = -1;
    iocb wake_poll;
    bool is_wake_armed = false;
    bool is_sync_refused = false; // this kernel or file system has no asynchronous fdatasync
    std::vector<iocb> blocks;     // by slot
    std::vector<iocb *> pending;  // pushed, not yet taken by the kernel
    uint32_t num_pending = 0;
    std::vector<io_event> events;
    std::atomic<uint64_t> kernel_entries{0};
};

} // namespace

static Aio *aio_of(tm_engine_state *state) { return reinterpret_cast<Aio *>(state); }

static void prepare(iocb *block, io_iocb_cmd command, int fd) {
    memset(block, 0, sizeof *block);
    block->data = block;
    block->aio_lio_opcode = (short)command;
    block->aio_fildes = fd;
}

static uint64_t read_limit(const char *path) {
    unsigned long long value = 0;
    FILE *file = fopen(path, "re");
    if (!file)
        return 0;
    if (fscanf(file, "%llu", &value) != 1)
        value = 0;
    fclose(file);
    return value;
}

// The kernel counts the events that every context of the machine was opened for, and refuses past a limit.
static void say_limit(uint32_t num_events, char *why, uint32_t why_bytes) {
    const uint64_t limit = read_limit("/proc/sys/fs/aio-max-nr"), used = read_limit("/proc/sys/fs/aio-nr");
    const uint64_t step = 65536, enough = (used + num_events + step - 1) / step * step;
    snprintf(
        why, why_bytes,
        "io_setup: /proc/sys/fs/aio-max-nr allows %llu events on this machine, %llu are in use, this queue needs %u: "
        "set it to %llu or more (sysctl -w fs.aio-max-nr=%llu) or lower the depth",
        (unsigned long long)limit, (unsigned long long)used, num_events, (unsigned long long)enough,
        (unsigned long long)enough);
}

static int say_why_not(int error, uint32_t depth, char *why, uint32_t why_bytes) {
    if (error == EAGAIN)
        say_limit(depth + 1, why, why_bytes);
    else
        snprintf(why, why_bytes, "io_setup: %s", strerror(error));
    return -error;
}

static void arm_wake(Aio *engine) {
    prepare(&engine->wake_poll, IO_CMD_POLL, engine->wake_fd);
    engine->wake_poll.u.poll.events = POLLIN;
    engine->pending[engine->num_pending++] = &engine->wake_poll;
    engine->is_wake_armed = true;
}

static void aio_close(tm_engine_state *state) {
    Aio *engine = aio_of(state);
    if (engine->context)
        io_destroy(engine->context); // also ends the poll
    if (engine->wake_fd >= 0)
        close(engine->wake_fd);
    delete engine;
}

// Opens the context and proves that it can poll (Linux 4.18).
static int open_context(Aio *engine, uint32_t depth, char *why, uint32_t why_bytes) {
    engine->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (engine->wake_fd < 0) {
        const int error = errno;
        snprintf(why, why_bytes, "eventfd: %s", strerror(error));
        return -error;
    }
    int answer = io_setup((int)depth + 1, &engine->context);
    if (answer < 0)
        return say_why_not(-answer, depth, why, why_bytes);
    arm_wake(engine);
    answer = io_submit(engine->context, 1, engine->pending.data());
    if (answer != 1) {
        snprintf(why, why_bytes, "io_submit cannot poll: %s (Linux 4.18 can)", strerror(-answer));
        return answer < 0 ? answer : -ENOSYS;
    }
    engine->num_pending = 0;
    return 0;
}

static int aio_open(const tm_queue_options *options, tm_engine_state **state, char *why, uint32_t why_bytes) {
    Aio *engine;
    try {
        engine = new Aio(options->depth);
    } catch (const std::bad_alloc &) {
        return -ENOMEM;
    }
    const int answer = open_context(engine, options->depth, why, why_bytes);
    if (answer < 0)
        aio_close(reinterpret_cast<tm_engine_state *>(engine));
    else
        *state = reinterpret_cast<tm_engine_state *>(engine);
    return answer;
}

static int64_t sync_here(Aio *engine, int fd) {
    engine->kernel_entries.fetch_add(1, std::memory_order_relaxed);
    return fdatasync(fd) == 0 ? 0 : -errno;
}

static tm_push aio_push(tm_engine_state *state, const tm_request *request, int64_t *result) {
    Aio *engine = aio_of(state);
    if (request->kind == TM_SYNC && engine->is_sync_refused) {
        *result = sync_here(engine, request->fd);
        return TM_PUSH_DONE;
    }
    iocb *block = &engine->blocks[request->slot];
    if (request->kind == TM_SYNC) {
        prepare(block, IO_CMD_FDSYNC, request->fd);
    } else {
        prepare(block, request->kind == TM_READ ? IO_CMD_PREAD : IO_CMD_PWRITE, request->fd);
        block->u.c.buf = request->buffer;
        block->u.c.nbytes = request->length;
        block->u.c.offset = (long long)request->offset;
    }
    engine->pending[engine->num_pending++] = block;
    return TM_PUSH_QUEUED;
}

static void drop_pending(Aio *engine, uint32_t count) {
    engine->num_pending -= count;
    memmove(engine->pending.data(), engine->pending.data() + count, engine->num_pending * sizeof(iocb *));
}

// The first pending block was refused for good: ends it, so that those behind it move on.
static tm_completion end_refused(Aio *engine, int error) {
    iocb *block = engine->pending[0];
    drop_pending(engine, 1);
    int64_t result = error;
    if (block->aio_lio_opcode == IO_CMD_FDSYNC && error == -EINVAL) {
        engine->is_sync_refused = true;
        result = sync_here(engine, (int)block->aio_fildes);
    }
    return {(uint32_t)(block - engine->blocks.data()), result};
}

// Hands over what is pending. A block that the kernel refuses becomes a completion. The count, or -errno when the
// kernel refuses the poll: without it a sleeping reap cannot be woken.
static int submit_pending(Aio *engine, tm_completion *completions, uint32_t max) {
    uint32_t count = 0;
    while (engine->num_pending > 0 && count < max) {
        const int taken = io_submit(engine->context, (long)engine->num_pending, engine->pending.data());
        engine->kernel_entries.fetch_add(1, std::memory_order_relaxed);
        if (taken > 0)
            drop_pending(engine, (uint32_t)taken);
        else if (taken == -EAGAIN || taken == -EINTR || taken == 0)
            break; // the kernel is short of memory: again at the next reap
        else if (engine->pending[0] == &engine->wake_poll)
            return taken;
        else
            completions[count++] = end_refused(engine, taken);
    }
    return (int)count;
}

static void drain_wake(Aio *engine) {
    uint64_t sum;
    const ssize_t taken = read(engine->wake_fd, &sum, sizeof sum); // nothing there: somebody woke twice
    (void)taken;
    engine->is_wake_armed = false;
}

static int aio_reap(tm_engine_state *state, tm_reap_mode mode, tm_completion *completions, uint32_t max) {
    Aio *engine = aio_of(state);
    if (!engine->is_wake_armed)
        arm_wake(engine);
    const int submitted = submit_pending(engine, completions, max);
    if (submitted < 0)
        return submitted;
    uint32_t count = (uint32_t)submitted;
    const uint32_t room = max - count < engine->events.size() ? max - count : (uint32_t)engine->events.size();
    if (room == 0)
        return (int)count;
    // Never asleep with something not handed over: it could be the one that everybody waits for.
    const bool may_sleep = mode == TM_REAP_WAIT && count == 0 && engine->num_pending == 0;
    const int num_events = io_getevents(engine->context, may_sleep ? 1 : 0, (long)room, engine->events.data(), nullptr);
    engine->kernel_entries.fetch_add(1, std::memory_order_relaxed);
    if (num_events < 0)
        return num_events == -EINTR ? (int)count : num_events;
    for (int i = 0; i < num_events; ++i) {
        const io_event &event = engine->events[i];
        iocb *block = (iocb *)event.data;
        if (block == &engine->wake_poll)
            drain_wake(engine);
        else
            completions[count++] = {(uint32_t)(block - engine->blocks.data()), (int64_t)event.res};
    }
    return (int)count;
}

static void aio_wake(tm_engine_state *state) {
    const uint64_t one = 1;
    // Fails only when the count is at its limit, and then the poll has fired anyway.
    const ssize_t written = write(aio_of(state)->wake_fd, &one, sizeof one);
    (void)written;
}

static uint64_t aio_kernel_entries(const tm_engine_state *state) {
    return reinterpret_cast<const Aio *>(state)->kernel_entries.load(std::memory_order_relaxed);
}

#else

static int aio_open(const tm_queue_options *, tm_engine_state **, char *why, uint32_t why_bytes) {
    snprintf(why, why_bytes, "built without libaio");
    return -ENOSYS;
}
static tm_push aio_push(tm_engine_state *, const tm_request *, int64_t *) { return TM_PUSH_FULL; }
static int aio_reap(tm_engine_state *, tm_reap_mode, tm_completion *, uint32_t) { return -ENOSYS; }
static void aio_wake(tm_engine_state *) {}
static uint64_t aio_kernel_entries(const tm_engine_state *) { return 0; }
static void aio_close(tm_engine_state *) {}

#endif

const tm_engine_functions tm_engine_aio = {"Linux AIO", aio_open,           aio_push,  aio_reap,
                                           aio_wake,    aio_kernel_entries, aio_close, nullptr};
