#include "group.h"

#include "operators.h"
#include "recording.h"

#include <ATen/ops/from_blob.h>
#include <c10/util/irange.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <set>
#include <thread>

namespace sim {

// ---- datagrams ------------------------------------------------------------------------------------------------------

/// Tells peers that this rank has started operation `number` of a channel, and hears it from them.
class Group::Post {
  public:
    struct Letter {
        int32_t from;
        int32_t is_collective; // else the channel between the two ranks
        uint64_t number;       // 0: the end, to oneself
    };
    using Read = std::function<void(const Letter &)>;

    Post(c10::intrusive_ptr<c10d::Store> shared, int my_rank, int num_ranks, Read read)
        : store(std::move(shared)), rank(my_rank), peers(num_ranks) {
        fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
        sockaddr_un address{};
        address.sun_family = AF_UNIX;
        TORCH_CHECK(fd >= 0 && bind(fd, reinterpret_cast<sockaddr *>(&address), sizeof(sa_family_t)) == 0,
                    "simccl: no socket: ", strerror(errno)); // the kernel chooses an abstract name
        socklen_t length = sizeof address;
        getsockname(fd, reinterpret_cast<sockaddr *>(&address), &length);
        const char *const name = reinterpret_cast<const char *>(&address);
        peers[rank] = std::string(name, length);
        store->set(key(rank), peers[rank]);
        reader = std::thread([this, read = std::move(read)] {
            pthread_setname_np(pthread_self(), "simccl-post");
            Letter letter;
            while (::recv(fd, &letter, sizeof letter, 0) == sizeof letter && letter.number)
                read(letter);
        });
    }

    ~Post() {
        send(rank, {rank, 0, 0});
        reader.join();
        close(fd);
    }

    void send(int to, const Letter &letter) {
        std::string address;
        {
            std::lock_guard guard(lock);
            if (peers[to].empty()) {
                const std::vector<uint8_t> found = store->get(key(to)); // waits until the peer is there
                peers[to] = {found.begin(), found.end()};
            }
            address = peers[to];
        }
        // A peer that is gone does not hear it; gloo will say so.
        (void)!::sendto(fd, &letter, sizeof letter, 0, reinterpret_cast<const sockaddr *>(address.data()),
                        address.size());
    }

  private:
    static std::string key(int rank) { return "simccl/" + std::to_string(rank); }

    const c10::intrusive_ptr<c10d::Store> store;
    const int rank;
    int fd;
    std::mutex lock; // guards peers
    std::vector<std::string> peers;
    std::thread reader;
};

// ---- channels -------------------------------------------------------------------------------------------------------

/// A sequence of operations: those of the group, or those between two ranks. Has a stream per device, and a thread that
/// runs operations that a peer or the schedule asks for. Two ranks number the operations that both take part in; a rank
/// numbers all of its own for itself.
class Channel {
  public:
    using Numbers = std::map<int, uint64_t>; // by rank

    explicit Channel(int my_rank) : rank(my_rank), runner([this] { run(); }) {}

    ~Channel() {
        {
            std::lock_guard guard(lock);
            is_closed = true;
        }
        changed.notify_all();
        runner.join();
    }

    c10::Stream stream(int device) {
        std::lock_guard guard(lock);
        const auto found = streams.find(device);
        return found != streams.end() ? found->second
                                      : streams.emplace(device, stream_of_its_own(device)).first->second;
    }

    /// The numbers of the next operation, which these peers take part in.
    Numbers next_numbers(const std::set<int> &peers) {
        Numbers numbers;
        std::lock_guard guard(lock);
        for (const int peer : peers)
            numbers[peer] = shared[peer].size() + 1;
        numbers[rank] = shared[rank].size() + 1;
        return numbers;
    }

    /// The newest operation of the channel.
    std::optional<Mark> newest() {
        std::lock_guard guard(lock);
        return last;
    }

    /// The operation of these numbers is issued.
    void add(const Numbers &numbers, const Mark &mark) {
        std::lock_guard guard(lock);
        last = mark;
        for (const auto &[peer, number] : numbers)
            shared[peer].push_back(mark);
        changed.notify_all();
    }

    /// Has the thread run the operation that has this number with a rank, as soon as it is issued.
    void ask_for(int with, uint64_t number) {
        std::lock_guard guard(lock);
        asked.emplace_back(with, number);
        changed.notify_all();
    }

    void run_all() {
        std::unique_lock guard(lock);
        const std::vector<Mark> marks = shared[rank];
        guard.unlock();
        for (const Mark &mark : marks)
            run_until(mark);
    }

    uint64_t num_issued() {
        std::lock_guard guard(lock);
        return shared[rank].size();
    }

  private:
    const int rank;
    std::mutex lock; // guards everything below
    std::condition_variable changed;
    std::map<int, c10::Stream> streams;          // by device
    std::map<int, std::vector<Mark>> shared;     // operations issued with each rank, the first has number 1
    std::vector<std::pair<int, uint64_t>> asked; // (rank, number)
    std::optional<Mark> last;
    bool is_closed = false;
    std::thread runner;

    /// Takes what was asked for and is issued.
    std::optional<Mark> next() {
        for (auto one = asked.begin(); one != asked.end(); ++one)
            if (const std::vector<Mark> &marks = shared[one->first]; one->second <= marks.size()) {
                const Mark mark = marks[one->second - 1];
                asked.erase(one);
                return mark;
            }
        return {};
    }

    void run() {
        pthread_setname_np(pthread_self(), "simccl-run");
        std::unique_lock guard(lock);
        while (true) {
            std::optional<Mark> mark;
            changed.wait(guard, [&] { return is_closed || (mark = next()); });
            if (is_closed)
                return;
            guard.unlock();
            run_until(*mark);
            guard.lock();
        }
    }
};

namespace {

// ---- work -----------------------------------------------------------------------------------------------------------

/// A collective that is issued. It keeps the tensors until the stream that waits for it has them in order.
class DeviceWork final : public c10d::Work {
  public:
    DeviceWork(int rank, c10d::OpType type, const Mark &place, Group::Tensors used)
        : Work(rank, type), mark(place), tensors(std::move(used)) {}

    ~DeviceWork() override {
        for (const at::Tensor &tensor : tensors) // nobody waited: the allocator must
            if (tensor.storage().data() && !is_bad_fork())
                c10::impl::getDeviceGuardImpl(DEVICE_TYPE)
                    ->recordDataPtrOnStream(tensor.storage().data_ptr(), stream());
    }

    bool isCompleted() override { return query(mark); }
    bool isSuccess() const override { return is_done(mark); }
    void synchronize() override { wait(kNoTimeout); }

    bool wait(std::chrono::milliseconds timeout) override {
        make_wait(current_stream(mark.device), mark);
        tensors.clear();
        if (timeout != kNoTimeout || retrieveOpType() == c10d::OpType::BARRIER)
            wait_on_host(mark, "collective");
        return true;
    }

    std::vector<at::Tensor> result() override { return tensors; }

    /// A future that is done, whose value the streams that ask for it wait for.
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
        const DeviceScope scope(mark.device);
        auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                               std::vector<c10::Device>{device_of(mark.device)});
        const c10::Stream before = set_current_stream(stream());
        future->markCompleted(c10::IValue(tensors));
        set_current_stream(before);
        return future;
    }

  private:
    const Mark mark;
    Group::Tensors tensors;

    c10::Stream stream() const { return c10::Stream(c10::Stream::UNSAFE, device_of(mark.device), mark.stream); }
};

/// Work of a call between startCoalescing and endCoalescing, whose Work is the one to wait for.
class NoWork final : public c10d::Work {
  public:
    bool isCompleted() override { return true; }
    bool isSuccess() const override { return true; }
    void synchronize() override {}
    bool wait(std::chrono::milliseconds /*timeout*/) override { return true; }
};

// ---- tensors --------------------------------------------------------------------------------------------------------

/// The bytes of a tensor as gloo takes them: it has no 8-bit floats, which only move.
at::Tensor bytes_of(const at::Tensor &tensor, const std::string &name) {
    const at::Tensor cpu = as_cpu(tensor, name);
    if (!at::isFloat8Type(tensor.scalar_type()))
        return cpu;
    return at::from_blob(cpu.data_ptr(), cpu.sizes(), cpu.strides(), cpu.options().dtype(at::kByte));
}

Group::Tensors bytes_of(const Group::Tensors &tensors, const std::string &name) {
    Group::Tensors found;
    for (const at::Tensor &tensor : tensors)
        found.push_back(bytes_of(tensor, name));
    return found;
}

/// All tensors on one device and contiguous, as NCCL wants them. Returns the device.
int check_tensors(const std::string &name, const Group::Tensors &tensors) {
    TORCH_CHECK(!tensors.empty(), "simccl: ", name, " without tensors");
    for (const at::Tensor &tensor : tensors) {
        TORCH_CHECK(is_on_device(tensor), "simccl: ", name, ": No backend type associated with device type ",
                    tensor.device().type(), ": tensors must be on a sim device, but found one on ", tensor.device());
        TORCH_CHECK(tensor.device() == tensors[0].device(), "simccl: ", name, ": tensors are on ", tensors[0].device(),
                    " and ", tensor.device());
        TORCH_CHECK(tensor.is_contiguous(), "simccl: ", name, ": Tensors must be contiguous");
    }
    return tensors[0].device().index();
}

/// As check_tensors, and of one size and type: other lists are broadcast one by one, which is not simulated.
void check_lists(const std::string &name, const Group::Tensors &tensors) {
    check_tensors(name, tensors);
    for (const at::Tensor &tensor : tensors)
        TORCH_CHECK(tensor.is_same_size(tensors[0]) && tensor.dtype() == tensors[0].dtype(), "simccl: ", name,
                    ": tensors of several sizes or types");
}

/// A buffer for as many elements as the tensors of a list have.
at::Tensor flat_for(const Group::Tensors &tensors) {
    const int64_t numel = tensors[0].numel() * static_cast<int64_t>(tensors.size());
    return empty_on(tensors[0].device().index(), {numel}, {1}, tensors[0].scalar_type());
}

/// The place of one tensor of a list in its buffer.
at::Tensor row_of(const at::Tensor &flat, const Group::Tensors &tensors, size_t at) {
    const int64_t numel = tensors[at].numel();
    return flat.narrow(0, static_cast<int64_t>(at) * numel, numel).view(tensors[at].sizes());
}

Group::Tensors joined(const Group::Tensors &one, const Group::Tensors &other) {
    Group::Tensors all = one;
    all.insert(all.end(), other.begin(), other.end());
    return all;
}

Group::Tensors joined(const Group::Tensors &one, const std::vector<Group::Tensors> &others) {
    Group::Tensors all = one;
    for (const Group::Tensors &other : others)
        all.insert(all.end(), other.begin(), other.end());
    return all;
}

} // namespace

// ---- the group ------------------------------------------------------------------------------------------------------

/// What operations and threads use, which may outlive a group that nobody shut down.
struct Group::Inner {
    const int rank;
    std::mutex lock;                                  // guards the channels
    std::map<int, std::unique_ptr<Channel>> channels; // by peer; ALL_RANKS: collectives
    std::unique_ptr<Post> post;                       // null once the group is shut down
    std::atomic<bool> is_aborted = false;
    std::atomic<std::chrono::milliseconds> timeout;

    Inner(int my_rank, std::chrono::milliseconds longest) : rank(my_rank), timeout(longest) {}

    Channel &channel(int peer) {
        std::lock_guard guard(lock);
        auto &found = channels[peer];
        if (!found)
            found = std::make_unique<Channel>(rank);
        return *found;
    }

    /// Waits for what gloo does. A failure of gloo is what a GPU would not notice: silence. Returns when the work has
    /// ended or the group is aborted; ends the process after the time-out, as NCCL's watchdog does.
    void await(const std::string &name, const Start &start) {
        using Clock = std::chrono::steady_clock;
        const auto since = Clock::now();
        std::string failure = "is under way";
        WorkPtr work;
        while (!is_aborted) {
            try {
                if (!work)
                    work = start();
                work->wait(is_bounded(*work) ? LOOK : kNoTimeout);
                return;
            } catch (const std::exception &error) {
                if (work && is_bounded(*work) && !(work->isCompleted() && work->exception())) {
                    end_if_late(name, since, failure);
                    continue; // the look was too short
                }
                failure = error.what();
                break;
            }
        }
        while (!is_aborted) {
            std::this_thread::sleep_for(LOOK);
            end_if_late(name, since, failure);
        }
    }

  private:
    static constexpr std::chrono::milliseconds LOOK{20};

    /// Whether a wait with a time-out leaves the work as it was. One for a message would close its connection.
    static bool is_bounded(const c10d::Work &work) {
        const auto type = const_cast<c10d::Work &>(work).retrieveOpType();
        return type != c10d::OpType::SEND && type != c10d::OpType::RECV && type != c10d::OpType::UNKNOWN;
    }

    void end_if_late(const std::string &name, std::chrono::steady_clock::time_point since, const std::string &failure) {
        if (std::chrono::steady_clock::now() - since < timeout.load())
            return;
        std::fprintf(stderr, "simccl: watchdog: %s on rank %d timed out (%s): the process ends\n", name.c_str(), rank,
                     failure.c_str());
        std::abort();
    }
};

Group::Group(c10::intrusive_ptr<c10d::Backend> inner_group, c10::intrusive_ptr<c10d::Store> where, int rank, int size,
             std::chrono::milliseconds timeout)
    : Backend(rank, size), gloo(std::move(inner_group)), store(std::move(where)), inner(new Inner(rank, timeout)) {
    inner->post = std::make_unique<Post>(store, rank, size, [found = inner](const Post::Letter &letter) {
        found->channel(letter.is_collective ? ALL_RANKS : letter.from).ask_for(letter.from, letter.number);
    });
}

Group::~Group() {
    if (!inner->post)
        delete inner;
    // Else destroy_process_group was not called: pending operations and threads keep the rest, so that nothing hangs.
}

void Group::shutdown() {
    if (!inner->post)
        return;
    const WithoutGil released;
    std::map<int, std::unique_ptr<Channel>> closing;
    if (!is_bad_fork()) {
        std::vector<Channel *> open;
        {
            std::lock_guard guard(inner->lock);
            for (const auto &[peer, one] : inner->channels)
                open.push_back(one.get());
        }
        for (Channel *const one : open)
            one->run_all();
    }
    inner->post.reset();
    std::lock_guard guard(inner->lock);
    closing.swap(inner->channels);
}

uint64_t Group::getSequenceNumberForGroup() { return inner->channel(ALL_RANKS).num_issued(); }

std::set<int> Group::all_peers() const {
    std::set<int> peers;
    for (const int peer : c10::irange(size_))
        if (peer != rank_)
            peers.insert(peer);
    return peers;
}

// ---- communicators --------------------------------------------------------------------------------------------------

/// Waits until these ranks have come to a place as well. Looks instead of waiting: a wait would keep others from the
/// store.
void Group::meet(const std::string &key, const std::set<int> &peers) {
    const WithoutGil released;
    store->set("simccl-met/" + key + "/" + std::to_string(rank_), std::string("come"));
    const auto since = std::chrono::steady_clock::now();
    for (const int peer : peers)
        while (!store->check({"simccl-met/" + key + "/" + std::to_string(peer)})) {
            TORCH_CHECK(!inner->is_aborted && std::chrono::steady_clock::now() - since < inner->timeout.load(),
                        "simccl: rank ", peer, " has not come to the communicator of ", key);
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
}

void Group::connect(int channel) {
    {
        std::lock_guard guard(lock);
        if (!connected.insert(channel).second)
            return;
    }
    if (channel == ALL_RANKS)
        meet("all", all_peers());
    else if (channel != rank_)
        meet(std::to_string(std::min(rank_, channel)) + ":" + std::to_string(std::max(rank_, channel)), {channel});
}

void Group::eagerConnectSingleDevice(at::Device /*device*/) { connect(ALL_RANKS); }

void Group::split() {
    int number;
    {
        std::lock_guard guard(lock);
        number = ++num_splits;
    }
    meet("split " + std::to_string(number), all_peers());
}

void Group::setTimeout(std::chrono::milliseconds timeout) {
    inner->timeout = timeout;
    gloo->setTimeout(timeout);
}

void Group::abort() { inner->is_aborted = true; }

// ---- calls ----------------------------------------------------------------------------------------------------------

c10::Stream Group::stream_of(const Parts &parts, int device) {
    return parts.is_async ? inner->channel(parts.channel).stream(device) : current_stream(device);
}

Group::WorkPtr Group::add(Parts parts, const std::function<void()> &before, const std::function<void()> &after) {
    TORCH_CHECK(inner->post, "simccl: the process group was destroyed");
    TORCH_CHECK(!inner->is_aborted, "simccl: the communicator was aborted");
    bool is_coalesced;
    {
        std::lock_guard guard(lock);
        is_coalesced = coalesced.has_value();
    }
    const int device = check_tensors(parts.name, parts.tensors);
    parts.peers = parts.channel == ALL_RANKS ? all_peers() : std::set<int>{parts.channel};
    if (is_coalesced)
        parts.channel = ALL_RANKS;
    connect(parts.channel);
    const c10::Stream stream = stream_of(parts, device);
    if (parts.is_async)
        make_wait(stream, mark_of(current_stream(device)));
    const auto queue = [&stream, device](const std::function<void()> &copies) {
        if (!copies)
            return;
        const DeviceScope scope(device);
        const c10::Stream caller = set_current_stream(stream);
        copies();
        set_current_stream(caller);
    };
    queue(before);
    if (!is_coalesced)
        return issue_parts(std::move(parts), [&] { queue(after); });
    queue(after); // from a buffer that is filled later
    std::lock_guard guard(lock);
    coalesced->name += (coalesced->name.empty() ? "" : ", ") + parts.name;
    coalesced->type = parts.type;
    coalesced->is_async = parts.is_async;
    for (Start &start : parts.starts)
        coalesced->starts.push_back(std::move(start));
    coalesced->tensors = joined(coalesced->tensors, parts.tensors);
    coalesced->peers.merge(parts.peers);
    return parts.is_async ? c10::make_intrusive<NoWork>() : nullptr;
}

Group::WorkPtr Group::issue_parts(Parts parts, const std::function<void()> &after) {
    const int device = parts.tensors[0].device().index();
    Channel &shared = inner->channel(parts.channel);
    const c10::Stream stream = stream_of(parts, device);
    if (const auto before = shared.newest(); before && before->stream != stream.id())
        make_wait(stream, *before);
    const Channel::Numbers numbers = shared.next_numbers(parts.peers);
    Operation operation;
    operation.run = [used = inner, numbers, name = parts.name, starts = parts.starts,
                     is_collective = parts.channel == ALL_RANKS] {
        for (const auto &[peer, number] : numbers)
            if (peer != used->rank && !used->is_aborted)
                used->post->send(peer, {used->rank, is_collective, number});
        const KernelGuard guard;
        std::vector<WorkPtr> started;
        used->await(name, [&] {
            for (const Start &start : starts)
                started.push_back(start());
            return started.back();
        });
        if (used->is_aborted)
            return;
        started.pop_back();
        for (const WorkPtr &work : started)
            used->await(name, [&] { return work; });
    };
    operation.run_elsewhere = [&shared, mine = rank_, number = numbers.at(rank_)] { shared.ask_for(mine, number); };
    Label label{"simccl::" + parts.name, Lane::COLLECTIVE};
    for (const at::Tensor &tensor : parts.tensors)
        label.bytes += tensor.nbytes();
    const Mark mark = issue(stream, std::move(operation), label);
    shared.add(numbers, mark);
    if (after)
        after();
    if (!parts.is_async)
        return nullptr;
    return c10::make_intrusive<DeviceWork>(rank_, parts.type, mark_of(stream), std::move(parts.tensors));
}

void Group::startCoalescing() {
    std::lock_guard guard(lock);
    if (coalescing_depth++ == 0)
        coalesced.emplace();
}

Group::WorkPtr Group::endCoalescing() {
    Parts parts;
    {
        std::lock_guard guard(lock);
        TORCH_CHECK(coalesced, "simccl: coalescing has not started");
        if (--coalescing_depth)
            return c10::make_intrusive<NoWork>(); // the outer call's Work is the one to wait for
        parts = std::move(*coalesced);
        coalesced.reset();
    }
    return parts.starts.empty() ? nullptr : issue_parts(std::move(parts));
}

// ---- collectives ----------------------------------------------------------------------------------------------------

Group::WorkPtr Group::broadcast(Tensors &tensors, const c10d::BroadcastOptions &options) {
    check_tensors("broadcast", tensors);
    const Start start = [gloo = gloo, bytes = bytes_of(tensors, "broadcast"), options]() mutable {
        return gloo->broadcast(bytes, options);
    };
    return add({.name = "broadcast",
                .starts = {start},
                .tensors = tensors,
                .type = c10d::OpType::BROADCAST,
                .is_async = options.asyncOp});
}

Group::WorkPtr Group::allreduce(Tensors &tensors, const c10d::AllreduceOptions &options) {
    check_tensors("all_reduce", tensors);
    const Start start = [gloo = gloo, bytes = bytes_of(tensors, "all_reduce"), options]() mutable {
        return gloo->allreduce(bytes, options);
    };
    return add({.name = "all_reduce",
                .starts = {start},
                .tensors = tensors,
                .type = c10d::OpType::ALLREDUCE,
                .is_async = options.asyncOp});
}

Group::WorkPtr Group::allreduce_coalesced(Tensors &tensors, const c10d::AllreduceCoalescedOptions &options) {
    startCoalescing();
    for (const at::Tensor &tensor : tensors) {
        Tensors one{tensor};
        allreduce(one, options);
    }
    return endCoalescing();
}

Group::WorkPtr Group::reduce(Tensors &tensors, const c10d::ReduceOptions &options) {
    check_tensors("reduce", tensors);
    const Start start = [gloo = gloo, bytes = bytes_of(tensors, "reduce"), options]() mutable {
        return gloo->reduce(bytes, options);
    };
    return add({.name = "reduce",
                .starts = {start},
                .tensors = tensors,
                .type = c10d::OpType::REDUCE,
                .is_async = options.asyncOp});
}

Group::WorkPtr Group::allgather(std::vector<Tensors> &outputs, Tensors &inputs, const c10d::AllgatherOptions &options) {
    const Tensors all = joined(inputs, outputs), into = outputs.at(0);
    check_lists("all_gather", all);
    at::Tensor flat = flat_for(into);
    const Start start = [gloo = gloo, to = bytes_of(flat, "all_gather"),
                         from = bytes_of(inputs[0], "all_gather").view(-1),
                         options]() mutable { return gloo->_allgather_base(to, from, options); };
    const auto copy_out = [&into, &flat] {
        for (const size_t at : c10::irange(into.size()))
            at::Tensor(into[at]).copy_(row_of(flat, into, at), true);
    };
    return add({.name = "all_gather",
                .starts = {start},
                .tensors = joined({flat}, all),
                .type = c10d::OpType::ALLGATHER,
                .is_async = options.asyncOp},
               {}, copy_out);
}

Group::WorkPtr Group::_allgather_base(at::Tensor &output, at::Tensor &input, const c10d::AllgatherOptions &options) {
    check_tensors("all_gather_into_tensor", {output, input});
    TORCH_CHECK(output.numel() == input.numel() * size_ && output.dtype() == input.dtype(),
                "simccl: all_gather_into_tensor: output has ", output.numel(), " elements of ", output.dtype(),
                ", not ", input.numel() * size_, " of ", input.dtype());
    const Start start = [gloo = gloo, to = bytes_of(output, "all_gather_into_tensor").view(-1),
                         from = bytes_of(input, "all_gather_into_tensor").view(-1),
                         options]() mutable { return gloo->_allgather_base(to, from, options); };
    return add({.name = "all_gather_into_tensor",
                .starts = {start},
                .tensors = {output, input},
                .type = c10d::OpType::_ALLGATHER_BASE,
                .is_async = options.asyncOp});
}

Group::WorkPtr Group::allgather_into_tensor_coalesced(Tensors &outputs, Tensors &inputs,
                                                      const c10d::AllgatherOptions &options) {
    startCoalescing();
    for (const size_t at : c10::irange(inputs.size()))
        _allgather_base(outputs.at(at), inputs[at], options);
    return endCoalescing();
}

Group::WorkPtr Group::gather(std::vector<Tensors> &outputs, Tensors &inputs, const c10d::GatherOptions &options) {
    const Tensors all = joined(inputs, outputs);
    check_tensors("gather", all);
    std::vector<Tensors> to;
    for (const Tensors &output : outputs)
        to.push_back(bytes_of(output, "gather"));
    const Start start = [gloo = gloo, to, from = bytes_of(inputs, "gather"), options]() mutable {
        return gloo->gather(to, from, options);
    };
    return add({.name = "gather",
                .starts = {start},
                .tensors = all,
                .type = c10d::OpType::GATHER,
                .is_async = options.asyncOp});
}

Group::WorkPtr Group::scatter(Tensors &outputs, std::vector<Tensors> &inputs, const c10d::ScatterOptions &options) {
    const Tensors all = joined(outputs, inputs);
    check_tensors("scatter", all);
    std::vector<Tensors> from;
    for (const Tensors &input : inputs)
        from.push_back(bytes_of(input, "scatter"));
    const Start start = [gloo = gloo, from, to = bytes_of(outputs, "scatter"), options]() mutable {
        return gloo->scatter(to, from, options);
    };
    return add({.name = "scatter",
                .starts = {start},
                .tensors = all,
                .type = c10d::OpType::SCATTER,
                .is_async = options.asyncOp});
}

Group::WorkPtr Group::reduce_scatter(Tensors &outputs, std::vector<Tensors> &inputs,
                                     const c10d::ReduceScatterOptions &options) {
    const Tensors all = joined(outputs, inputs), from = inputs.at(0);
    check_lists("reduce_scatter", all);
    at::Tensor flat = flat_for(from);
    const Start start = [gloo = gloo, from = bytes_of(flat, "reduce_scatter"),
                         to = bytes_of(outputs[0], "reduce_scatter").view(-1),
                         options]() mutable { return gloo->_reduce_scatter_base(to, from, options); };
    const auto copy_in = [&from, &flat] {
        for (const size_t at : c10::irange(from.size()))
            row_of(flat, from, at).copy_(from[at], true);
    };
    return add({.name = "reduce_scatter",
                .starts = {start},
                .tensors = joined({flat}, all),
                .type = c10d::OpType::REDUCE_SCATTER,
                .is_async = options.asyncOp},
               copy_in);
}

Group::WorkPtr Group::_reduce_scatter_base(at::Tensor &output, at::Tensor &input,
                                           const c10d::ReduceScatterOptions &options) {
    check_tensors("reduce_scatter_tensor", {output, input});
    TORCH_CHECK(input.numel() == output.numel() * size_ && output.dtype() == input.dtype(),
                "simccl: reduce_scatter_tensor: input has ", input.numel(), " elements of ", input.dtype(), ", not ",
                output.numel() * size_, " of ", output.dtype());
    const Start start = [gloo = gloo, to = bytes_of(output, "reduce_scatter_tensor").view(-1),
                         from = bytes_of(input, "reduce_scatter_tensor").view(-1),
                         options]() mutable { return gloo->_reduce_scatter_base(to, from, options); };
    return add({.name = "reduce_scatter_tensor",
                .starts = {start},
                .tensors = {output, input},
                .type = c10d::OpType::_REDUCE_SCATTER_BASE,
                .is_async = options.asyncOp});
}

Group::WorkPtr Group::reduce_scatter_tensor_coalesced(Tensors &outputs, Tensors &inputs,
                                                      const c10d::ReduceScatterOptions &options) {
    startCoalescing();
    for (const size_t at : c10::irange(inputs.size()))
        _reduce_scatter_base(outputs.at(at), inputs[at], options);
    return endCoalescing();
}

Group::WorkPtr Group::alltoall_base(at::Tensor &output, at::Tensor &input, std::vector<int64_t> &output_sizes,
                                    std::vector<int64_t> &input_sizes, const c10d::AllToAllOptions &options) {
    check_tensors("all_to_all_single", {output, input});
    const Start start = [gloo = gloo, to = bytes_of(output, "all_to_all_single"),
                         from = bytes_of(input, "all_to_all_single"), output_sizes, input_sizes, options]() mutable {
        return gloo->alltoall_base(to, from, output_sizes, input_sizes, options);
    };
    return add({.name = "all_to_all_single",
                .starts = {start},
                .tensors = {output, input},
                .type = c10d::OpType::ALLTOALL_BASE,
                .is_async = options.asyncOp});
}

Group::WorkPtr Group::alltoall(Tensors &outputs, Tensors &inputs, const c10d::AllToAllOptions &options) {
    check_tensors("all_to_all", joined(outputs, inputs));
    const Start start = [gloo = gloo, to = bytes_of(outputs, "all_to_all"), from = bytes_of(inputs, "all_to_all"),
                         options]() mutable { return gloo->alltoall(to, from, options); };
    return add({.name = "all_to_all",
                .starts = {start},
                .tensors = joined(outputs, inputs),
                .type = c10d::OpType::ALLTOALL,
                .is_async = options.asyncOp});
}

Group::WorkPtr Group::send(Tensors &tensors, int rank, int tag) {
    check_tensors("send", tensors);
    const Start start = [gloo = gloo, bytes = bytes_of(tensors, "send"), rank, tag]() mutable {
        return gloo->send(bytes, rank, tag);
    };
    return add({.name = "send", .starts = {start}, .tensors = tensors, .type = c10d::OpType::SEND, .channel = rank});
}

Group::WorkPtr Group::recv(Tensors &tensors, int rank, int tag) {
    check_tensors("recv", tensors);
    const Start start = [gloo = gloo, bytes = bytes_of(tensors, "recv"), rank, tag]() mutable {
        return gloo->recv(bytes, rank, tag);
    };
    return add({.name = "recv", .starts = {start}, .tensors = tensors, .type = c10d::OpType::RECV, .channel = rank});
}

Group::WorkPtr Group::barrier(const c10d::BarrierOptions &options) {
    const int device = options.device_ids.empty() ? current_device() : static_cast<int>(options.device_ids[0]);
    const at::Tensor place = empty_on(device, {1}, {1}, at::kByte);
    const Start start = [gloo = gloo, options] { return gloo->barrier(options); };
    WorkPtr work = add({.name = "barrier",
                        .starts = {start},
                        .tensors = {place},
                        .type = c10d::OpType::BARRIER,
                        .is_async = options.asyncOp});
    if (!work)
        wait_on_host(mark_of(current_stream(device)), "collective");
    return work;
}

} // namespace sim
