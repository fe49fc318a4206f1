// A process group of device tensors: collectives that run when their stream gets there, by a gloo group over the bytes.
//
//   all_reduce ──> wait for the current stream ──> operation of the group's stream ──> gloo, on all ranks
//   work.wait() ──> the current stream waits; the host does not, as with NCCL
//
// Its rules are NCCL's, from torch's ProcessGroupNCCL.cpp (the functions named here) and NCCL's user guide:
//
//   collective        an asynchronous call runs on the group's stream, after what the current stream holds at the call;
//                     a synchronous call runs on the current stream, keeps nothing and returns no Work
//   startCoalescing   calls from there on are launched together by endCoalescing. Copies of a list all_gather are
//   queued
//                     by the call, so before the launch. Without a call endCoalescing returns no Work
//   allgather,        lists travel through a flat buffer: copies follow the gather, and come before the reduction
//   reduce_scatter
//   WorkNCCL::wait    orders the current stream and lets the tensors go; with a time-out it blocks the host
//   initNCCLComm      the first call makes the communicator: it blocks the host until all ranks have come. A pair of
//   ranks
//                     has its own, unless its messages are coalesced. With a device_id the group makes it at once
//   performNocolorSplit  a group beside one with a device_id is split from it: every rank of that one must take part
//   barrier           blocks the host
//   Watchdog          a peer that is gone is silence. After the time-out the process ends by SIGABRT, unless abort()
//   came
//
// "Group Calls" and "CUDA Stream Semantics" of the guide: operations of one communicator run in the order of the calls,
// also where they are given to different streams.
//
// A collective blocks until every rank runs its part. A GPU would, without its host; here some thread must. So a rank
// that starts tells its peers (a datagram), and each has a thread that runs its own stream up to the same collective as
// soon as it is issued. That keeps "late" as late as any rank waits.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace sim {

class Group final : public c10d::Backend {
  public:
    using Tensors = std::vector<at::Tensor>;
    using WorkPtr = c10::intrusive_ptr<c10d::Work>;
    using Start = std::function<WorkPtr()>;

    /// `gloo` has the same ranks. `store` is where ranks find the addresses of one another.
    Group(c10::intrusive_ptr<c10d::Backend> gloo, c10::intrusive_ptr<c10d::Store> store, int rank, int size,
          std::chrono::milliseconds timeout);
    ~Group() override;

    const std::string getBackendName() const override { return "simccl"; }
    bool supportsCoalescing() const override { return true; }
    bool supportsSplitting() const override { return true; }
    void setTimeout(std::chrono::milliseconds timeout) override;
    void eagerConnectSingleDevice(at::Device device) override;
    /// Takes part in the next split of this group. Blocks until every rank has.
    void split();
    /// Ends what is pending, which leaves its tensors undefined; later calls are refused. Does not block.
    void abort() override;
    void setSequenceNumberForGroup() override {}
    uint64_t getSequenceNumberForGroup() override;
    /// Runs what was issued, so that no peer waits for this rank, and ends the threads. Blocks.
    /// destroy_process_group calls it; a group that is destroyed without it leaves its threads, and hangs nobody.
    void shutdown() override;

    WorkPtr broadcast(Tensors &tensors, const c10d::BroadcastOptions &options) override;
    WorkPtr allreduce(Tensors &tensors, const c10d::AllreduceOptions &options) override;
    WorkPtr allreduce_coalesced(Tensors &tensors, const c10d::AllreduceCoalescedOptions &options) override;
    WorkPtr reduce(Tensors &tensors, const c10d::ReduceOptions &options) override;
    WorkPtr allgather(std::vector<Tensors> &outputs, Tensors &inputs, const c10d::AllgatherOptions &options) override;
    WorkPtr _allgather_base(at::Tensor &output, at::Tensor &input, const c10d::AllgatherOptions &options) override;
    WorkPtr allgather_into_tensor_coalesced(Tensors &outputs, Tensors &inputs,
                                            const c10d::AllgatherOptions &options) override;
    WorkPtr gather(std::vector<Tensors> &outputs, Tensors &inputs, const c10d::GatherOptions &options) override;
    WorkPtr scatter(Tensors &outputs, std::vector<Tensors> &inputs, const c10d::ScatterOptions &options) override;
    WorkPtr reduce_scatter(Tensors &outputs, std::vector<Tensors> &inputs,
                           const c10d::ReduceScatterOptions &options) override;
    WorkPtr _reduce_scatter_base(at::Tensor &output, at::Tensor &input,
                                 const c10d::ReduceScatterOptions &options) override;
    WorkPtr reduce_scatter_tensor_coalesced(Tensors &outputs, Tensors &inputs,
                                            const c10d::ReduceScatterOptions &options) override;
    WorkPtr alltoall_base(at::Tensor &output, at::Tensor &input, std::vector<int64_t> &output_sizes,
                          std::vector<int64_t> &input_sizes, const c10d::AllToAllOptions &options) override;
    WorkPtr alltoall(Tensors &outputs, Tensors &inputs, const c10d::AllToAllOptions &options) override;
    WorkPtr send(Tensors &tensors, int rank, int tag) override;
    WorkPtr recv(Tensors &tensors, int rank, int tag) override;
    WorkPtr barrier(const c10d::BarrierOptions &options) override;

    /// What is called until endCoalescing is one operation of the stream, whose parts start together. Calls may nest.
    void startCoalescing() override;
    WorkPtr endCoalescing() override;

  private:
    static constexpr int ALL_RANKS = -1;

    /// One operation of a stream, in parts that start together.
    struct Parts {
        std::string name;
        std::vector<Start> starts;
        Tensors tensors; // on the device, which the parts use
        c10d::OpType type = c10d::OpType::COALESCED;
        std::set<int> peers;     // the other ranks that take part
        int channel = ALL_RANKS; // or the peer of a send or recv
        bool is_async = true;
    };

    /// Does a call, or keeps it for endCoalescing. `after`: queued behind the call on its stream.
    WorkPtr add(Parts parts, const std::function<void()> &before = {}, const std::function<void()> &after = {});
    WorkPtr issue_parts(Parts parts, const std::function<void()> &after = {});
    c10::Stream stream_of(const Parts &parts, int device);
    void connect(int channel);
    void meet(const std::string &key, const std::set<int> &peers);
    std::set<int> all_peers() const;

    const c10::intrusive_ptr<c10d::Backend> gloo;
    const c10::intrusive_ptr<c10d::Store> store;
    std::mutex lock;         // guards the rest
    std::set<int> connected; // channels that have a communicator
    int num_splits = 0;
    int coalescing_depth = 0;
    std::optional<Parts> coalesced; // between startCoalescing and endCoalescing

    class Post; // the datagrams
    struct Inner;
    Inner *const inner;
};

} // namespace sim
