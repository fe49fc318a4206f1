// queue: what callers ask of a queue. See queue.h for its parts and for the way of a block.

#include <chrono>
#include <errno.h>
#include <new>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "queue.h"

static const int64_t MAX_TIMEOUT_NS = 1ll << 55; // a year; keeps deadlines from overflowing

int64_t tm_now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

int64_t tm_thread_cpu_ns(std::thread *thread) {
    clockid_t clock;
    timespec used;
    if (pthread_getcpuclockid(thread->native_handle(), &clock) != 0 || clock_gettime(clock, &used) != 0)
        return 0;
    return used.tv_sec * 1000000000ll + used.tv_nsec;
}

// As <linux/sched/types.h> has it; the headers of 2014 lack it.
struct Schedule {
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t slice_ns, deadline_ns, period_ns;
};

static const uint64_t SHORT_SLICE_NS = 100000; // the shortest that Linux grants

void tm_thread_wakes_soon() {
    Schedule mine = {};
    if (syscall(SYS_sched_getattr, 0, &mine, sizeof mine, 0) != 0)
        return;
    mine.slice_ns = SHORT_SLICE_NS;
    syscall(SYS_sched_setattr, 0, &mine, 0);
}

// ---- lists of ops -------------------------------------------------------------------------------

void tm_list_append(tm_queue *q, tm_waiting *op) {
    tm_list *list = &q->lists[op->priority];
    op->next = nullptr;
    op->previous = list->last;
    (list->last ? list->last->next : list->first) = op;
    list->last = op;
}

void tm_list_remove(tm_queue *q, tm_waiting *op) {
    tm_list *list = &q->lists[op->priority];
    (op->previous ? op->previous->next : list->first) = op->next;
    (op->next ? op->next->previous : list->last) = op->previous;
}

tm_waiting *tm_list_first(const tm_queue *q) {
    for (const tm_list &list : q->lists)
        if (list.first)
            return list.first;
    return nullptr;
}

static bool is_waiting(const tm_waiting *op) { return op->length > 0; }

// ---- how a tag ends -----------------------------------------------------------------------------

void tm_tag_answer_if_ended(tm_queue *q, tm_tag *tag, int64_t now) {
    if (tag->is_answered || tag->num_waiting > 0 || tag->num_flying > 0)
        return;
    tag->answer.finished_ns = now;
    tag->is_answered = true;
    q->num_ringing -= tag->bell != nullptr;
    if (--q->num_open_tags == 0)
        q->counters.wanted_ns += now - q->wanted_since_ns;
    q->has_news |= q->num_waiters > 0;
    if (tag->bell)
        tag->bell->ring();
}

bool tm_tag_drop_waiting(tm_queue *q, tm_tag *tag) {
    if (tag->num_waiting == 0)
        return false;
    for (tm_waiting *op = tag->first; op; op = op->next_of_tag) {
        if (!is_waiting(op))
            continue;
        tm_list_remove(q, op);
        op->length = 0;
    }
    tag->num_waiting = 0;
    return true;
}

void tm_tag_note_error(tm_tag *tag, int error, int fd, int kind, uint64_t offset, uint64_t length) {
    if (tag->answer.error != 0)
        return;
    tag->answer.error = error;
    tag->answer.fd = fd;
    tag->answer.kind = kind;
    tag->answer.offset = offset;
    tag->answer.length = length;
}

// ---- submit -------------------------------------------------------------------------------------

static bool is_valid(const tm_op &op) {
    if (op.fd < 0 || op.kind < TM_READ || op.kind > TM_SYNC || op.priority < TM_URGENT || op.priority > TM_BACKGROUND)
        return false;
    if (op.kind == TM_SYNC)
        return true;
    return op.buffer && op.length > 0 && op.offset <= (uint64_t)INT64_MAX && op.length <= INT64_MAX - op.offset;
}

// A sync is one block of length 1, so that it is cut like any other; engines do not look at the length.
static tm_waiting waiting_of(const tm_op &op) {
    const bool is_sync = op.kind == TM_SYNC;
    return {(char *)op.buffer,
            is_sync ? 0 : op.offset,
            is_sync ? 1 : op.length,
            op.fd,
            op.kind,
            op.priority,
            nullptr,
            nullptr,
            nullptr,
            nullptr};
}

static void add_to_tag(tm_tag *tag, tm_waiting *op) {
    op->tag = tag;
    (tag->last ? tag->last->next_of_tag : tag->first) = op;
    tag->last = op;
    ++tag->num_waiting;
}

static bool starts_run(const tm_op *ops, uint32_t i) { return i == 0 || ops[i].tag != ops[i - 1].tag; }

// May throw bad_alloc. Nothing is in the lists yet, so the tags can be taken out again. A tag is looked up once for
// each run of ops that carry it.
static int add_tags(tm_queue *q, const tm_op *ops, uint32_t n, const std::shared_ptr<tm_waiting[]> &waiting,
                    tm_bell *bell) {
    const int64_t now = tm_now_ns();
    const bool is_first = q->num_open_tags == 0;
    tm_tag *tag = nullptr;
    for (uint32_t i = 0; i < n; ++i) {
        if (starts_run(ops, i)) {
            tag = &q->tags[ops[i].tag];
            if (!tag->ops) {
                tag->ops = waiting;
                tag->bell = bell;
                tag->answer.submitted_ns = now;
                ++q->num_open_tags;
                q->num_ringing += bell != nullptr;
            } else if (tag->ops != waiting) {
                return -EEXIST;
            }
        }
        add_to_tag(tag, &waiting[i]);
    }
    if (is_first)
        q->wanted_since_ns = now;
    return 0;
}

static void remove_tags(tm_queue *q, const tm_op *ops, uint32_t n, const std::shared_ptr<tm_waiting[]> &waiting) {
    for (uint32_t i = 0; i < n; ++i) {
        const auto found = starts_run(ops, i) ? q->tags.find(ops[i].tag) : q->tags.end();
        if (found == q->tags.end() || found->second.ops != waiting)
            continue;
        q->num_ringing -= found->second.bell != nullptr;
        q->tags.erase(found);
        --q->num_open_tags;
    }
}

static int take(tm_queue *q, const tm_op *ops, uint32_t n, const std::shared_ptr<tm_waiting[]> &waiting, tm_bell *bell,
                uint64_t most_bytes) {
    std::lock_guard<std::mutex> lock(q->mutex);
    if (q->is_closing)
        return -ESHUTDOWN;
    if (q->failure != 0)
        return -q->failure;
    int answer;
    try {
        answer = add_tags(q, ops, n, waiting, bell);
    } catch (...) {
        answer = -ENOMEM;
    }
    if (answer < 0) {
        remove_tags(q, ops, n, waiting);
        return answer;
    }
    if (bell)
        q->most_bytes = most_bytes;
    for (uint32_t i = 0; i < n; ++i)
        tm_list_append(q, &waiting[i]); // in the order they were given, whatever their tags
    if (q->is_asleep && tm_may_cut(q)) {
        q->is_asleep = false; // one wake-up is enough
        q->engine->wake(q->engine_state);
    }
    return 0;
}

int tm_queue_submit_ringing(tm_queue *queue, const tm_op *ops, uint32_t n, tm_bell *bell, uint64_t most_bytes) {
    if (!queue || (n > 0 && !ops))
        return -EINVAL;
    if (queue->owner != getpid())
        return -EPIPE;
    for (uint32_t i = 0; i < n; ++i)
        if (!is_valid(ops[i]))
            return -EINVAL;
    std::shared_ptr<tm_waiting[]> waiting;
    try {
        waiting.reset(new tm_waiting[n]);
    } catch (...) {
        return -ENOMEM;
    }
    for (uint32_t i = 0; i < n; ++i)
        waiting[i] = waiting_of(ops[i]);
    return take(queue, ops, n, waiting, bell, most_bytes);
}

int tm_queue_submit(tm_queue *queue, const tm_op *ops, uint32_t n) {
    return tm_queue_submit_ringing(queue, ops, n, nullptr, 0);
}

// ---- wait, promote, cancel ----------------------------------------------------------------------

static tm_tag *find_tag(tm_queue *q, uint64_t tag) {
    const auto found = q->tags.find(tag);
    return found == q->tags.end() ? nullptr : &found->second;
}

static void raise(tm_queue *q, tm_tag *tag, int priority) {
    if (tag->num_waiting == 0)
        return;
    for (tm_waiting *op = tag->first; op; op = op->next_of_tag) {
        if (!is_waiting(op) || op->priority <= priority)
            continue;
        tm_list_remove(q, op);
        op->priority = priority;
        tm_list_append(q, op);
    }
}

static int take_answer(tm_queue *q, uint64_t id, const tm_tag *tag, tm_answer *answer) {
    *answer = tag->answer;
    q->tags.erase(id);
    return 0;
}

// The tag is looked up anew after every sleep: another waiter may have taken the answer.
static int sleep_until_answered(tm_queue *q, std::unique_lock<std::mutex> *lock, uint64_t id, int64_t timeout_ns,
                                tm_answer *answer) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::nanoseconds(timeout_ns);
    for (bool is_late = false;;) {
        const tm_tag *tag = find_tag(q, id);
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
    tm_tag *found = find_tag(queue, tag);
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
    tm_tag *found = find_tag(queue, tag);
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
    tm_tag *found = find_tag(queue, tag);
    if (!found)
        return -ENOENT;
    found->is_cancelled = true; // remainders to push again are dropped by the thread
    for (const tm_waiting *op = found->first; op; op = op->next_of_tag)
        if (is_waiting(op)) {
            tm_tag_note_error(found, ECANCELED, op->fd, op->kind, op->offset, op->length);
            break;
        }
    if (tm_tag_drop_waiting(queue, found))
        tm_tag_answer_if_ended(queue, found, tm_now_ns());
    if (queue->has_news) {
        queue->has_news = false;
        queue->tag_answered.notify_all();
    }
    return 0;
}

// ---- totals -------------------------------------------------------------------------------------

// CPU time of the queue's thread and of those its engine started; 0 where the system cannot say.
static int64_t cpu_ns(tm_queue *q) {
    int64_t sum = tm_thread_cpu_ns(&q->thread);
    if (q->engine->cpu_ns)
        sum += q->engine->cpu_ns(q->engine_state);
    return sum;
}

int tm_queue_counters(tm_queue *queue, tm_counters *counters) {
    if (!queue || !counters)
        return -EINVAL;
    if (queue->owner != getpid())
        return -EPIPE;
    std::lock_guard<std::mutex> lock(queue->mutex);
    *counters = queue->counters;
    const int64_t now = tm_now_ns();
    if (!tm_is_idle(queue))
        counters->busy_ns += now - queue->busy_since_ns;
    if (queue->num_open_tags > 0)
        counters->wanted_ns += now - queue->wanted_since_ns;
    if (queue->failure == 0) {
        counters->kernel_entries = queue->engine->kernel_entries(queue->engine_state);
        counters->cpu_ns = cpu_ns(queue);
    }
    return 0;
}

int tm_queue_latencies(tm_queue *queue, int32_t kind, uint64_t *counts) {
    if (!queue || !counts || kind < TM_READ || kind > TM_WRITE)
        return -EINVAL;
    if (queue->owner != getpid())
        return -EPIPE;
    std::lock_guard<std::mutex> lock(queue->mutex);
    memcpy(counts, queue->latencies[kind].counts, sizeof queue->latencies[kind].counts);
    return 0;
}

int64_t tm_latency_floor_ns(uint32_t bucket) {
    const uint32_t last = TM_LATENCY_BUCKETS;
    return (int64_t)tm_latency_floor(bucket < last ? bucket : last);
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
            num_errors += entry.second.answer.error != 0 && entry.second.answer.error != ECANCELED;
    }
    delete queue;
    return num_errors;
}
