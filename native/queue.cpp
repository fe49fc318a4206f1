// queue: blocks on their way between memory and files; one native thread for each queue.
//
//     submit -> op waits in the list of its priority -> cut into blocks, at most `depth` in slots
//            -> engine -> completion looked at -> remainder pushed again, or block ended
//            -> last block of a tag ended: the tag is answered -> wait copies the answer
//
// The thread alone calls the engine; everything else is guarded by one mutex. Any thread may submit: it appends
// and, when the thread sleeps and a slot is free, wakes it. An op is cut when a slot becomes free, so
// a long queue costs one small object for each op, and promoting or cancelling costs what the tag's ops cost.
//
// A short transfer keeps its slot and is pushed again for its remainder before anything new. On a file
// opened with O_DIRECT the remainder starts at the last 4096 boundary, since the middle of a sector
// cannot be asked for. EINTR and EAGAIN are pushed again whole. Without progress this ends after MAX_STALLS.

#include <chrono>
#include <condition_variable>
#include <errno.h>
#include <fcntl.h>
#include <list>
#include <memory>
#include <mutex>
#include <new>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <thread>
#include <time.h>
#include <unistd.h>
#include <unordered_map>
#include <vector>

#include "engine.h"
#include "tiermem.h"

namespace {

const unsigned NUM_PRIORITIES = 3;
const unsigned MAX_STALLS = 1000;
const uint64_t MAX_BLOCK = 1ull << 30;      // below what one system call transfers
const int64_t MAX_TIMEOUT_NS = 1ll << 55;   // a year; keeps deadlines from overflowing
const std::chrono::microseconds PAUSE(200); // before a refused block is pushed again with nothing in flight

struct Tag;

// What of one tm_op is not yet cut into blocks. In the list of its priority until nothing is left.
struct Op {
    char *buffer;
    uint64_t offset, length;
    int fd, kind, priority;
    Tag *tag;
    Op *previous, *next;
};

struct Tag {
    std::list<Op> ops;               // a list: their addresses are in the lists of priorities
    std::list<Op>::iterator next_op; // while they are being appended
    uint32_t num_waiting = 0;        // ops with something left to cut
    uint32_t num_flying = 0;         // slots
    bool is_cancelled = false;
    bool is_answered = false;
    tm_answer answer = {};
};

// One block in flight. `request` is what was last pushed: the block, or what is left of it.
struct Slot {
    tm_request request;
    uint64_t offset, length; // the whole block
    Tag *tag;                // NULL: the slot is free
    unsigned num_stalls;     // pushes in a row that transferred nothing
};

struct List {
    Op *first = nullptr, *last = nullptr;
};

int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

} // namespace

struct tm_queue {
    pid_t owner;
    uint64_t block_bytes = 0;
    const tm_engine_functions *engine = nullptr; // called by the thread alone, but for `wake`
    tm_engine_state *engine_state = nullptr;
    std::thread thread;

    std::mutex mutex; // guards everything below
    std::condition_variable tag_answered;
    std::condition_variable waiter_left;
    std::unordered_map<uint64_t, std::unique_ptr<Tag>> tags;
    List lists[NUM_PRIORITIES];
    std::vector<Slot> slots;
    std::vector<uint32_t> free_slots;
    std::vector<uint32_t> again; // slots to push again, first of all
    tm_counters counters = {};
    int64_t busy_since_ns = 0; // 0: no slot is taken
    uint32_t num_waiters = 0;
    int failure = 0; // the engine itself broke: everything ends in this errno
    bool is_asleep = false;
    bool is_closing = false;

    // The thread's own; sized once.
    std::vector<uint32_t> batch; // slots to push now
    std::vector<tm_completion> completions;
    uint32_t num_inside = 0;     // slots the engine has
    bool is_backing_off = false; // the kernel said EAGAIN: not again at once
};

bool tm_engine_is_direct(int fd) {
    const int flags = fcntl(fd, F_GETFL);
    return flags >= 0 && (flags & O_DIRECT);
}

// ---- lists of ops -------------------------------------------------------------------------------

static void append_op(tm_queue *q, Op *op) {
    List *list = &q->lists[op->priority];
    op->next = nullptr;
    op->previous = list->last;
    (list->last ? list->last->next : list->first) = op;
    list->last = op;
}

static void unlink_op(tm_queue *q, Op *op) {
    List *list = &q->lists[op->priority];
    (op->previous ? op->previous->next : list->first) = op->next;
    (op->next ? op->next->previous : list->last) = op->previous;
}

static Op *first_op(const tm_queue *q) {
    for (const List &list : q->lists)
        if (list.first)
            return list.first;
    return nullptr;
}

static bool is_waiting(const Op &op) { return op.length > 0; }

// ---- how a tag ends -----------------------------------------------------------------------------

static void answer_if_ended(tm_queue *q, Tag *tag) {
    if (tag->is_answered || tag->num_waiting > 0 || tag->num_flying > 0)
        return;
    tag->answer.finished_ns = now_ns();
    tag->is_answered = true;
    if (q->num_waiters > 0)
        q->tag_answered.notify_all();
}

// Takes the tag's ops out of the lists; true when there was one.
static bool drop_waiting(tm_queue *q, Tag *tag) {
    if (tag->num_waiting == 0)
        return false;
    for (Op &op : tag->ops) {
        if (!is_waiting(op))
            continue;
        unlink_op(q, &op);
        op.length = 0;
    }
    tag->num_waiting = 0;
    return true;
}

// The first error of a tag is kept.
static void note_error(Tag *tag, int error, int fd, int kind, uint64_t offset, uint64_t length) {
    if (tag->answer.error != 0)
        return;
    tag->answer.error = error;
    tag->answer.fd = fd;
    tag->answer.kind = kind;
    tag->answer.offset = offset;
    tag->answer.length = length;
}

static void end_slot(tm_queue *q, uint32_t index, int error) {
    Slot *slot = &q->slots[index];
    Tag *tag = slot->tag;
    if (error != 0) {
        note_error(tag, error, slot->request.fd, slot->request.kind, slot->offset,
                   slot->request.kind == TM_SYNC ? 0 : slot->length);
        drop_waiting(q, tag);
        tag->answer.bytes += slot->request.offset - slot->offset;
    } else if (slot->request.kind != TM_SYNC) {
        tag->answer.bytes += slot->length;
    }
    slot->tag = nullptr;
    q->free_slots.push_back(index);
    if (q->free_slots.size() == q->slots.size()) {
        q->counters.busy_ns += now_ns() - q->busy_since_ns;
        q->busy_since_ns = 0;
    }
    --tag->num_flying;
    answer_if_ended(q, tag);
}

// ---- completions --------------------------------------------------------------------------------

static void push_again(tm_queue *q, uint32_t index, bool has_progress, int error_at_last) {
    Slot *slot = &q->slots[index];
    slot->num_stalls = has_progress ? 0 : slot->num_stalls + 1;
    if (slot->num_stalls > MAX_STALLS) {
        end_slot(q, index, error_at_last);
        return;
    }
    ++q->counters.resumed;
    q->again.push_back(index);
}

// A read that ended at the end of a regular file would end there for ever.
static bool is_at_end(const tm_request &request, uint64_t position) {
    struct stat file;
    return request.kind == TM_READ && fstat(request.fd, &file) == 0 && S_ISREG(file.st_mode) &&
           position >= (uint64_t)file.st_size;
}

static void resume_short(tm_queue *q, uint32_t index, uint64_t bytes) {
    tm_request *request = &q->slots[index].request;
    if (request->kind == TM_READ && bytes == 0) {
        end_slot(q, index, ENODATA);
        return;
    }
    uint64_t position = request->offset + bytes;
    if (tm_engine_is_direct(request->fd)) {
        if (is_at_end(*request, position)) {
            end_slot(q, index, ENODATA);
            return;
        }
        position -= position % TM_DIRECT_ALIGN;
        if (position < request->offset)
            position = request->offset;
    }
    const uint64_t step = position - request->offset;
    request->buffer += step;
    request->offset += step;
    request->length -= (uint32_t)step;
    push_again(q, index, step > 0, EIO);
}

static void settle(tm_queue *q, uint32_t index, int64_t result) {
    const tm_request &request = q->slots[index].request;
    if (result == -EINTR || result == -EAGAIN) {
        q->is_backing_off |= result == -EAGAIN;
        push_again(q, index, false, (int)-result);
        return;
    }
    if (result > 0 && request.kind != TM_SYNC)
        (request.kind == TM_READ ? q->counters.read_bytes : q->counters.written_bytes) += (uint64_t)result;
    if (result >= 0 && request.kind != TM_SYNC && (uint64_t)result < request.length) {
        resume_short(q, index, (uint64_t)result);
        return;
    }
    ++q->counters.blocks;
    end_slot(q, index, result < 0 ? (int)-result : 0);
}

// ---- the thread ---------------------------------------------------------------------------------

static void cut_block(tm_queue *q, Op *op, int64_t now) {
    if (q->busy_since_ns == 0)
        q->busy_since_ns = now;
    const uint32_t index = q->free_slots.back();
    q->free_slots.pop_back();
    Slot *slot = &q->slots[index];
    const uint64_t length = op->length < q->block_bytes ? op->length : q->block_bytes;
    slot->request = {op->buffer, op->offset, (uint32_t)length, index, op->fd, op->kind};
    slot->offset = op->offset;
    slot->length = length;
    slot->tag = op->tag;
    slot->num_stalls = 0;
    op->buffer += length;
    op->offset += length;
    op->length -= length;
    ++op->tag->num_flying;
    if (op->tag->answer.started_ns == 0)
        op->tag->answer.started_ns = now;
    if (op->length == 0) {
        unlink_op(q, op);
        --op->tag->num_waiting;
    }
    q->batch.push_back(index);
}

// Chooses what to push: remainders, then new blocks in the order of priority.
static void fill_batch(tm_queue *q) {
    q->batch.clear();
    for (const uint32_t index : q->again) {
        const Slot &slot = q->slots[index];
        if (slot.tag->answer.error != 0 || slot.tag->is_cancelled)
            end_slot(q, index, ECANCELED); // an earlier error stays
        else
            q->batch.push_back(index);
    }
    q->again.clear();
    Op *op = first_op(q);
    const int64_t now = op ? now_ns() : 0;
    for (; op && !q->free_slots.empty(); op = first_op(q))
        cut_block(q, op, now);
}

// Gives the batch to the engine. Leaves in `completions` those that ended at once (their number is
// returned) and in `batch` those that were refused.
static uint32_t push_batch(tm_queue *q) {
    uint32_t num_done = 0;
    size_t pushed = 0;
    for (; pushed < q->batch.size(); ++pushed) {
        const uint32_t index = q->batch[pushed];
        int64_t result = 0;
        const tm_push answer = q->engine->push(q->engine_state, &q->slots[index].request, &result);
        if (answer == TM_PUSH_FULL)
            break;
        if (answer == TM_PUSH_DONE)
            q->completions[num_done++] = {index, result};
        else
            ++q->num_inside;
    }
    q->batch.erase(q->batch.begin(), q->batch.begin() + (ptrdiff_t)pushed);
    return num_done;
}

// The engine itself broke, and is closed by now, so that no buffer is written any more.
static void fail_everything(tm_queue *q) {
    std::lock_guard<std::mutex> lock(q->mutex);
    q->again.clear();
    for (uint32_t index = 0; index < q->slots.size(); ++index)
        if (q->slots[index].tag)
            end_slot(q, index, q->failure);
    while (Op *op = first_op(q)) {
        Tag *tag = op->tag;
        note_error(tag, q->failure, op->fd, op->kind, op->offset, op->length);
        drop_waiting(q, tag);
        answer_if_ended(q, tag);
    }
}

// False when the queue is closing and nothing is left.
static bool choose(tm_queue *q) {
    std::lock_guard<std::mutex> lock(q->mutex);
    fill_batch(q);
    q->is_asleep = true; // a submit from here on wakes us; waking somebody awake is harmless
    return !q->is_closing || q->free_slots.size() < q->slots.size();
}

// Looks at `count` completions; takes back what the engine refused.
static void settle_all(tm_queue *q, uint32_t count) {
    std::lock_guard<std::mutex> lock(q->mutex);
    q->is_asleep = false;
    q->is_backing_off = !q->batch.empty();
    q->again.insert(q->again.end(), q->batch.begin(), q->batch.end());
    for (uint32_t i = 0; i < count; ++i)
        settle(q, q->completions[i].slot, q->completions[i].result);
}

// One turn: choose, push, sleep until something ends, look at it. False when it was the last.
static bool turn(tm_queue *q) {
    if (!choose(q))
        return false;
    if (q->is_backing_off && q->num_inside == 0)
        std::this_thread::sleep_for(PAUSE);
    const uint32_t num_done = push_batch(q);
    // Asleep with refused blocks only while something is in flight, whose end makes room.
    const bool may_sleep = num_done == 0 && (q->batch.empty() || q->num_inside > 0);
    const int reaped = q->engine->reap(q->engine_state, may_sleep ? TM_REAP_WAIT : TM_REAP_LOOK,
                                       q->completions.data() + num_done, (uint32_t)q->completions.size() - num_done);
    if (reaped < 0) {
        std::lock_guard<std::mutex> lock(q->mutex);
        q->failure = -reaped;
        return false;
    }
    q->num_inside -= (uint32_t)reaped;
    settle_all(q, num_done + (uint32_t)reaped);
    return true;
}

// ---- open ---------------------------------------------------------------------------------------

namespace {

const uint32_t WHY_BYTES = 256;

// What the opener and the new thread tell each other.
struct Opening {
    const tm_queue_options *options;
    int engine = 0; // enum tm_engine: the one in use
    int answer = 0; // 0 or -errno
    char why[2 * WHY_BYTES] = "";
    bool is_over = false; // guarded by the queue's mutex
    std::condition_variable over;
};

} // namespace

static const tm_engine_functions *engine_of(int engine) {
    if (engine == TM_ENGINE_URING)
        return &tm_engine_uring;
    return engine == TM_ENGINE_AIO ? &tm_engine_aio : &tm_engine_threads;
}

// Appends one remark to the line that says why.
static void add_why(Opening *opening, const char *engine, const char *between, const char *remark) {
    const size_t used = strlen(opening->why);
    snprintf(opening->why + used, sizeof opening->why - used, "%s%s%s%s", used ? "; " : "", engine,
             remark[0] ? between : "", remark);
}

static int try_engine(tm_queue *q, Opening *opening, int engine) {
    const tm_engine_functions *functions = engine_of(engine);
    char remark[WHY_BYTES] = "";
    const int answer = functions->open(opening->options, &q->engine_state, remark, sizeof remark);
    if (answer < 0) {
        char refusal[WHY_BYTES + 16];
        snprintf(refusal, sizeof refusal, "no %s", functions->name);
        add_why(opening, refusal, ": ", remark[0] ? remark : strerror(-answer));
        return answer;
    }
    add_why(opening, functions->name, ", ", remark);
    opening->engine = engine;
    q->engine = functions;
    return 0;
}

static int open_engine(tm_queue *q, Opening *opening) {
    const int asked = opening->options->engine;
    int answer = -ENOSYS;
    for (int engine = TM_ENGINE_URING; engine <= TM_ENGINE_THREADS; ++engine) {
        if (asked != TM_ENGINE_AUTO && asked != engine)
            continue;
        answer = try_engine(q, opening, engine);
        if (answer == 0 || answer == -ENOMEM)
            break;
    }
    if (answer < 0 || opening->options->num_faults == 0)
        return answer;
    tm_engine_state *inner = q->engine_state;
    answer = tm_engine_faulty_open(opening->options, q->engine, inner, &q->engine_state);
    if (answer < 0) {
        q->engine->close(inner);
        return answer;
    }
    q->engine = &tm_engine_faulty;
    add_why(opening, "with injected faults", "", "");
    return 0;
}

static void run(tm_queue *q, Opening *opening) {
    const int answer = open_engine(q, opening);
    {
        std::lock_guard<std::mutex> lock(q->mutex);
        opening->answer = answer;
        opening->is_over = true;
        opening->over.notify_one(); // under the lock: the opener frees it as soon as it may
    }
    if (answer < 0)
        return;
    while (turn(q))
        continue;
    q->engine->close(q->engine_state);
    if (q->failure != 0)
        fail_everything(q);
}

static bool is_valid(const tm_queue_options *options) {
    if (options->engine < TM_ENGINE_AUTO || options->engine > TM_ENGINE_THREADS)
        return false;
    if (options->depth < 1 || options->depth > 4096 || options->threads > 1024)
        return false;
    if (options->block_bytes == 0 || options->block_bytes % 4096 != 0 || options->block_bytes > MAX_BLOCK)
        return false;
    if (options->num_faults > 0 && !options->faults)
        return false;
    if (options->num_regions > 0 && (!options->regions || !options->region_bytes))
        return false;
    for (uint32_t i = 0; i < options->num_regions; ++i)
        if (!options->regions[i] || options->region_bytes[i] == 0)
            return false;
    return true;
}

// Everything the thread will need, so that it never allocates.
static void reserve(tm_queue *q, const tm_queue_options *options) {
    q->block_bytes = options->block_bytes;
    q->slots.resize(options->depth);
    q->free_slots.reserve(options->depth);
    for (uint32_t index = options->depth; index > 0; --index)
        q->free_slots.push_back(index - 1);
    q->again.reserve(options->depth);
    q->batch.reserve(options->depth);
    q->completions.resize(options->depth);
}

static void start_thread(tm_queue *q, Opening *opening) {
    // Signals are for the program's own threads.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
        q->thread = std::thread(run, q, opening);
    } catch (...) {
        opening->answer = -EAGAIN; // no more threads for this process
        opening->is_over = true;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

static int open_queue(const tm_queue_options *options, tm_queue **queue, Opening *opening) {
    std::unique_ptr<tm_queue> q(new tm_queue);
    q->owner = getpid();
    reserve(q.get(), options);
    start_thread(q.get(), opening);
    {
        std::unique_lock<std::mutex> lock(q->mutex);
        opening->over.wait(lock, [&] { return opening->is_over; });
    }
    if (opening->answer == 0)
        *queue = q.release();
    else if (q->thread.joinable())
        q->thread.join();
    return opening->answer;
}

int tm_queue_open(const tm_queue_options *options, tm_queue **queue, int32_t *engine, char *why, uint32_t why_bytes) {
    if (why && why_bytes > 0)
        why[0] = 0;
    if (!options || !queue || !is_valid(options))
        return -EINVAL;
    Opening opening;
    opening.options = options;
    int answer;
    try {
        answer = open_queue(options, queue, &opening);
    } catch (...) {
        answer = -ENOMEM;
    }
    if (why && why_bytes > 0)
        snprintf(why, why_bytes, "%s", opening.why);
    if (engine)
        *engine = opening.engine;
    return answer;
}

// ---- submit -------------------------------------------------------------------------------------

static bool is_valid(const tm_op &op) {
    if (op.fd < 0 || op.kind < TM_READ || op.kind > TM_SYNC || op.priority < TM_URGENT || op.priority > TM_BACKGROUND)
        return false;
    if (op.kind == TM_SYNC)
        return true;
    return op.buffer && op.length > 0 && op.offset <= (uint64_t)INT64_MAX && op.length <= INT64_MAX - op.offset;
}

static int refuse(const tm_queue *q, const tm_op *ops, uint32_t n) {
    if (q->is_closing)
        return -ESHUTDOWN;
    if (q->failure != 0)
        return -q->failure;
    for (uint32_t i = 0; i < n; ++i)
        if (q->tags.count(ops[i].tag))
            return -EEXIST;
    return 0;
}

// A sync is one block of length 1, so that it is cut like any other; engines do not look at the length.
static Op make_op(const tm_op &op, Tag *tag) {
    const bool is_sync = op.kind == TM_SYNC;
    return {(char *)op.buffer,
            is_sync ? 0 : op.offset,
            is_sync ? 1 : op.length,
            op.fd,
            op.kind,
            op.priority,
            tag,
            nullptr,
            nullptr};
}

// May throw bad_alloc; nothing is in the lists yet, so the tags can be taken out again.
static void add_tags(tm_queue *q, const tm_op *ops, uint32_t n) {
    const int64_t now = now_ns();
    for (uint32_t i = 0; i < n; ++i) {
        std::unique_ptr<Tag> &tag = q->tags[ops[i].tag];
        if (!tag) {
            tag.reset(new Tag);
            tag->answer.submitted_ns = now;
        }
        tag->ops.push_back(make_op(ops[i], tag.get()));
    }
}

static void remove_tags(tm_queue *q, const tm_op *ops, uint32_t n) {
    for (uint32_t i = 0; i < n; ++i)
        q->tags.erase(ops[i].tag);
}

// Puts the ops into the lists in the order they were given, whatever their tags.
static void append_all(tm_queue *q, const tm_op *ops, uint32_t n) {
    for (uint32_t i = 0; i < n; ++i) {
        Tag *tag = q->tags.find(ops[i].tag)->second.get();
        tag->next_op = tag->num_waiting == 0 ? tag->ops.begin() : std::next(tag->next_op);
        append_op(q, &*tag->next_op);
        ++tag->num_waiting;
    }
}

int tm_queue_submit(tm_queue *queue, const tm_op *ops, uint32_t n) {
    if (!queue || (n > 0 && !ops))
        return -EINVAL;
    if (queue->owner != getpid())
        return -EPIPE;
    for (uint32_t i = 0; i < n; ++i)
        if (!is_valid(ops[i]))
            return -EINVAL;
    std::lock_guard<std::mutex> lock(queue->mutex);
    const int answer = refuse(queue, ops, n);
    if (answer < 0 || n == 0)
        return answer;
    try {
        add_tags(queue, ops, n);
    } catch (...) {
        remove_tags(queue, ops, n);
        return -ENOMEM;
    }
    append_all(queue, ops, n);
    if (queue->is_asleep && !queue->free_slots.empty()) {
        queue->is_asleep = false; // one wake-up is enough
        queue->engine->wake(queue->engine_state);
    }
    return 0;
}

// ---- wait, promote, cancel ----------------------------------------------------------------------

static Tag *find_tag(tm_queue *q, uint64_t tag) {
    const auto found = q->tags.find(tag);
    return found == q->tags.end() ? nullptr : found->second.get();
}

static void raise(tm_queue *q, Tag *tag, int priority) {
    if (tag->num_waiting == 0)
        return;
    for (Op &op : tag->ops) {
        if (!is_waiting(op) || op.priority <= priority)
            continue;
        unlink_op(q, &op);
        op.priority = priority;
        append_op(q, &op);
    }
}

static int take_answer(tm_queue *q, uint64_t id, const Tag *tag, tm_answer *answer) {
    *answer = tag->answer;
    q->tags.erase(id);
    return 0;
}

// The tag is looked up anew after every sleep: another waiter may have taken the answer.
static int sleep_until_answered(tm_queue *q, std::unique_lock<std::mutex> *lock, uint64_t id, int64_t timeout_ns,
                                tm_answer *answer) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::nanoseconds(timeout_ns);
    for (bool is_late = false;;) {
        const Tag *tag = find_tag(q, id);
        if (!tag)
            return -ENOENT;
        if (tag->is_answered)
            return take_answer(q, id, tag, answer);
        if (is_late)
            return -ETIMEDOUT;
        is_late = q->tag_answered.wait_until(*lock, deadline) == std::cv_status::timeout;
    }
}

int tm_queue_wait(tm_queue *queue, uint64_t tag, int64_t timeout_ns, tm_answer *answer) {
    if (!queue || !answer)
        return -EINVAL;
    if (queue->owner != getpid())
        return -EPIPE;
    std::unique_lock<std::mutex> lock(queue->mutex);
    Tag *found = find_tag(queue, tag);
    if (!found)
        return -ENOENT;
    if (found->is_answered)
        return take_answer(queue, tag, found, answer);
    if (timeout_ns == 0)
        return -ETIMEDOUT;
    raise(queue, found, TM_URGENT);
    if (timeout_ns < 0 || timeout_ns > MAX_TIMEOUT_NS)
        timeout_ns = MAX_TIMEOUT_NS;
    ++queue->num_waiters;
    const int result = sleep_until_answered(queue, &lock, tag, timeout_ns, answer);
    if (--queue->num_waiters == 0)
        queue->waiter_left.notify_all();
    return result;
}

int tm_queue_promote(tm_queue *queue, uint64_t tag, int32_t priority) {
    if (!queue || priority < TM_URGENT || priority > TM_BACKGROUND)
        return -EINVAL;
    if (queue->owner != getpid())
        return -EPIPE;
    std::lock_guard<std::mutex> lock(queue->mutex);
    Tag *found = find_tag(queue, tag);
    if (!found)
        return -ENOENT;
    raise(queue, found, priority);
    return 0;
}

int tm_queue_cancel(tm_queue *queue, uint64_t tag) {
    if (!queue)
        return -EINVAL;
    if (queue->owner != getpid())
        return -EPIPE;
    std::lock_guard<std::mutex> lock(queue->mutex);
    Tag *found = find_tag(queue, tag);
    if (!found)
        return -ENOENT;
    found->is_cancelled = true; // remainders to push again are dropped by the thread
    for (const Op &op : found->ops)
        if (is_waiting(op)) {
            note_error(found, ECANCELED, op.fd, op.kind, op.offset, op.length);
            break;
        }
    if (drop_waiting(queue, found))
        answer_if_ended(queue, found);
    return 0;
}

int tm_queue_counters(tm_queue *queue, tm_counters *counters) {
    if (!queue || !counters)
        return -EINVAL;
    if (queue->owner != getpid())
        return -EPIPE;
    std::lock_guard<std::mutex> lock(queue->mutex);
    *counters = queue->counters;
    if (queue->busy_since_ns != 0)
        counters->busy_ns += now_ns() - queue->busy_since_ns;
    if (queue->failure == 0)
        counters->kernel_entries = queue->engine->kernel_entries(queue->engine_state);
    return 0;
}

// ---- close --------------------------------------------------------------------------------------

int tm_queue_close(tm_queue *queue) {
    if (!queue)
        return -EINVAL;
    if (queue->owner != getpid())
        return -EPIPE;
    {
        std::lock_guard<std::mutex> lock(queue->mutex);
        queue->is_closing = true;
        if (queue->failure == 0)
            queue->engine->wake(queue->engine_state);
    }
    queue->thread.join();
    int num_errors = 0;
    {
        // Every tag is answered now; whoever waits for one leaves.
        std::unique_lock<std::mutex> lock(queue->mutex);
        queue->waiter_left.wait(lock, [&] { return queue->num_waiters == 0; });
        for (const auto &entry : queue->tags)
            num_errors += entry.second->answer.error != 0 && entry.second->answer.error != ECANCELED;
    }
    delete queue;
    return num_errors;
}
