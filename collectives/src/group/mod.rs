//! Connects ranks to a group, in which they run collective operations together.
//!
//! | to | use |
//! | --- | --- |
//! | open a group | [`Group::open`], or [`GroupOptions`] |
//! | prepare an operation once | [`Group::all_gather`] and its siblings, then [`OperationBuilder::prepare`] |
//! | run a collective on any memory without preparation | [`Group::immediate`] |
//! | run it many times | [`Operation::input_mut`], [`Operation::run`], [`Operation::output`] |
//! | do something else meanwhile | [`Operation::start`] on the host, [`Operation::start_on`] on a stream |
//! | change lengths and places between starts | [`OperationBuilder::resizable`] and [`Operation::resize`] |
//! | send another number of elements to each rank in every start, which receivers learn | [`Group::all_to_all_v`] |
//! | share memory between operations | [`Group::window`], or [`Group::register`] and [`Group::register_descriptor`] for memory of your own |
//! | send messages to single peers | [`Group::channel`] |
//! | communicate in smaller groups, or go on without lost ranks | [`Group::split`], [`Group::shrink`] |
//! | learn why a group has ended | [`Group::end`], [`Group::abort_record`] |
//!
//! # Threads
//!
//! Every handle is [`Send`] and [`Sync`], except [`MemoryRange`], which holds an address. Methods
//! that start, wait or send take `&mut self`, so one thread at a time makes the calls of an
//! operation or a channel. Operations of one group can be run by several threads, as long as every
//! rank calls the collective methods of [`Group`] in the same order.
//!
//! ```
//! use peerlane::group::{Started, WindowSlice};
//! use peerlane::{Buffer, Channel, Group, GroupEnd, Lease, Notification, Operation};
//! use peerlane::{AllToAllV, OwnedStart, Window};
//!
//! fn is_send_and_sync<T: Send + Sync>() {}
//! is_send_and_sync::<(Group, GroupEnd, Window<f32>, WindowSlice<f32>, Buffer<f32>)>();
//! is_send_and_sync::<(Operation<f32>, Started<f32>, OwnedStart<f32>, Lease<f32>)>();
//! is_send_and_sync::<(AllToAllV<f32>, Channel<f32>, Notification)>();
//! ```

// The files of this module:
//
// | file | holds |
// | --- | --- |
// | `mod.rs`, `options.rs` | [`Group`], and the options to open it |
// | `split.rs` | smaller groups over the fabrics of a group |
// | `operation/` | operations: description, plan, preparation, starts |
// | `immediate/` | calls that need no preparation by the caller |
// | `window/`, `buffer.rs`, `registration.rs` | registered memory, shared by operations or given to one |
// | `agreement.rs` | the exchange in which all ranks compare what must be equal |
// | `identity.rs` | the names of a group and of its ranks in errors |
// | `call.rs`, `caller.rs` | the calls that ranks tell each other, and the threads that make them |
// | `refusal.rs` | how a rank tells the others that it refuses a call |
// | `stats.rs` | descriptions of the memory that a group holds |
// | `trim.rs` | the sums of that memory, and the release of what nothing uses |
// | `heap.rs` | memory at equal offsets on all ranks, from which operations get flags, inputs and outputs |
// | `segment.rs` | memory that both fabrics have registered, and the exchange of its keys |
// | `engines.rs` | the kinds of engines that all ranks offer |
// | `links.rs`, `network.rs` | the links of a group, and how the network reaches memory of the local fabric |
// | `runtime.rs` | the life cycle, the work and the driver of a group, together |
// | `life.rs`, `end.rs` | whether a group is open, why it has ended, and the report to the caller |
// | `control/` | the decision why a group ends |
// | `driver/` | the threads that look after the work of groups |
// | `tracker.rs` | what is known of the starts of an operation |
// | `start_part.rs` | the lengths and places of a start, which ranks compare |
// | `eager.rs` | how long a future polls in the thread of its caller |
// | `event.rs` | descriptors and wakers of callers that wait for an end or a start |
// | `report.rs` | the report of how an operation runs |

mod agreement;
mod buffer;
mod call;
mod caller;
mod channel;
mod control;
mod driver;
mod eager;
mod end;
mod engines;
mod event;
mod heap;
mod identity;
mod immediate;
mod life;
mod links;
mod network;
mod operation;
mod options;
mod refusal;
mod registration;
mod report;
mod runtime;
mod segment;
mod selection;
mod split;
mod start_part;
mod stats;
mod tracker;
mod trim;
mod window;

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use peerlane_hal::{Deadline, DynFabric, ErrorKind, Fabric, Rank};

use agreement::{Offer, agree};
pub use buffer::{Buffer, MemoryRange};
pub use caller::Caller;
pub use channel::{
    Channel, ChannelEvent, ChannelReport, CopyRange, MessageTicket, Notification, Rows, SharedWait,
    StreamMessages,
};
use driver::Membership;
pub use end::GroupEnd;
pub use engines::EngineKind;
use heap::{Allocation, Demand, Heap};
pub use immediate::{Immediate, ImmediateStart, Input, Output, WindowPart};
pub use life::GroupState;
use life::{Close, Closed};
use operation::Proofs;
pub use operation::{
    AllToAllV, AllToAllVBuilder, Arrival, BesideStart, BlockChunk, BlockLens, BlockPart,
    Destination, Lease, Matrix, Operation, OperationBuilder, OperationDescription, OutputPart,
    OwnedBesideStart, OwnedStart, Part, SendCounts, Started, UntypedOperation,
};
pub use options::GroupOptions;
pub use report::{AdditionReport, Fallback, LaneReport, LinkReport, PlanRange, Report, TierReport};
use runtime::Runtime;
use segment::{Fabrics, Segment};
pub use selection::Selection;
use stats::BufferBytes;
pub use stats::{CallCounts, CallPath, GroupStats, MemoryKind, MemoryUse};
use window::WindowUses;
pub use window::{Unreleased, Window, WindowSlice, WindowSliceMut};

use crate::bootstrap::Bootstrap;
pub use crate::bootstrap::{AbortRecord, Cause};
use crate::cost::Links;
use crate::error::Error;
use crate::plan::Algorithm;
use crate::topology::Topology;

/// The ranks that run collective operations together, like a communicator in MPI or NCCL.
///
/// A group prepares [operations](Operation) such as all-gathers, each with its memory. All ranks
/// call the methods marked *collective* in the same order. When a rank is lost or a deadline
/// passes, the group ends on every rank: all calls return the same error, and the outputs of
/// unfinished operations are undefined.
///
/// ```
/// use peerlane::bootstrap::{Bootstrap, in_process};
/// use peerlane::{Group, host};
///
/// // Two ranks as threads of this process.
/// in_process::run(2, |bootstrap| {
///     let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
///     let mut group = Group::open(bootstrap, fabric)?;
///     let mut gather = group.all_gather::<f32>(3).prepare()?;
///     gather.input_mut()?.fill(group.rank().0 as f32);
///     gather.run()?;
///     assert_eq!(gather.output()?, [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]);
///     group.close()
/// })
/// .unwrap();
/// ```
pub struct Group {
    /// Dropped first, so that threads of the driver end before what they use.
    membership: Membership,
    setup: Setup,
    runtime: Arc<Runtime>,
    prepared: u64,
    windows: u64,
    channels: u64,
    splits: u64,
    users: Arc<WindowUses>,
    heap: Heap,
    /// Windows whose release has failed. A peer may still write to their memory, even if the caller
    /// drops them.
    unreleased: Vec<Arc<window::Inner>>,
    /// The windows whose memory Peerlane has allocated.
    allocated_windows: Vec<Weak<window::Inner>>,
    /// The buffers that Peerlane has allocated for single operations.
    buffer_bytes: Arc<BufferBytes>,
    proofs: Proofs,
    barrier: Option<Operation<u8>>,
    immediate: immediate::Calls,
}

/// What does not change while a group is open.
#[derive(Clone)]
struct Setup {
    fabric: Arc<DynFabric>,
    network: Option<Arc<DynFabric>>,
    topology: Topology,
    strict: bool,
    beside_compute: bool,
    refusal: Option<Arc<str>>,
    /// The kinds of engines that all ranks offer, the preferred one first, at least one. They are
    /// equal on all ranks, so that all choose the same kind and algorithm.
    engines: Arc<[EngineKind]>,
    /// The kind that operations use unless they name another one.
    engine: Option<String>,
    /// The measured links that the caller has given.
    given_links: Vec<Links>,
    selection: Selection,
    /// Whether the group was split from another one, whose heap and fabrics it uses.
    is_split: bool,
}

impl Group {
    fn new(membership: Membership, setup: Setup, runtime: Arc<Runtime>, heap: Heap) -> Self {
        runtime.join_driver();

        Self {
            membership,
            setup,
            runtime,
            prepared: 0,
            windows: 0,
            channels: 0,
            splits: 0,
            users: Arc::default(),
            heap,
            proofs: Default::default(),
            unreleased: Vec::new(),
            allocated_windows: Vec::new(),
            buffer_bytes: Arc::default(),
            barrier: None,
            immediate: immediate::Calls::default(),
        }
    }

    /// Opens a group of the ranks that a bootstrap connects, with the default
    /// [options](GroupOptions). Collective.
    ///
    /// # Errors
    /// As [`GroupOptions::open`].
    pub fn open(bootstrap: impl Bootstrap + 'static, fabric: impl Fabric) -> Result<Self, Error> {
        GroupOptions::default().open(bootstrap, fabric)
    }

    /// Returns the number of this rank in the group.
    pub fn rank(&self) -> Rank {
        self.runtime.life.bootstrap.rank()
    }

    /// Returns the number of ranks in the group.
    pub fn ranks(&self) -> usize {
        self.runtime.life.bootstrap.ranks()
    }

    /// Returns the name of the group in errors, which [`GroupOptions::label`] sets; `None` for a
    /// first group without one.
    pub fn label(&self) -> Option<&str> {
        self.runtime.life.identity.label.as_deref()
    }

    /// Returns the topology of the group, that is, which rank belongs to which node.
    pub fn topology(&self) -> &Topology {
        &self.setup.topology
    }

    /// Returns the default timeout of the group's operations and exchanges.
    pub fn timeout(&self) -> Duration {
        self.runtime.life.timeout
    }

    /// Returns the fabric that connects the ranks of a node, or all ranks if the group has only one
    /// fabric.
    ///
    /// [`DynFabric::downcast_ref`] returns it with its type.
    pub fn fabric(&self) -> &DynFabric {
        &self.setup.fabric
    }

    /// Returns the backends and the GPU that this rank uses, and why they were chosen.
    ///
    /// The GPU is known if the group was opened by the crate `peerlane`, or told by
    /// [`GroupOptions::selected`].
    pub fn selection(&self) -> &Selection {
        &self.setup.selection
    }

    /// Returns the link rates from which the group chooses algorithms for engines of the first
    /// kind.
    pub fn links(&self) -> &Links {
        self.setup.engines[0].links()
    }

    /// Returns the kinds of engines that all ranks offer, the preferred kind first; at least one.
    pub fn engines(&self) -> &[EngineKind] {
        &self.setup.engines
    }

    /// Returns the record that names the cause of the group's end; `None` if the group has not
    /// ended.
    pub fn abort_record(&self) -> Option<AbortRecord> {
        self.runtime.life.record()
    }

    /// Returns a handle that reports the end of the group: as a file descriptor, as a future, or by
    /// a check.
    ///
    /// # Errors
    /// [`OutOfMemory`](ErrorKind::OutOfMemory) if the process has no descriptor left.
    pub fn end(&self) -> Result<GroupEnd, Error> {
        GroupEnd::new(&self.runtime.life)
    }

    fn fabrics(&self) -> Fabrics<'_> {
        self.setup.fabrics(&self.runtime)
    }

    /// Grows the heap by segments that have room for `demands`. Collective.
    fn grow_heap(&mut self, demands: &[Demand], deadline: Deadline) -> Result<(), Error> {
        let Self { heap, setup, runtime, .. } = self;
        heap.grow(runtime, setup.fabrics(runtime), demands, deadline)
    }

    /// Takes blocks from the heap, which grows until they fit. Collective.
    fn take_blocks(
        &mut self,
        demands: &[Demand],
        deadline: Deadline,
    ) -> Result<(Allocation, Vec<Segment>), Error> {
        loop {
            match self.heap.allocate(demands, None) {
                Ok(taken) => return Ok(taken),
                Err(missing) => self.grow_heap(&missing, deadline)?,
            }
        }
    }

    /// Waits until every rank of the group has called `barrier`. Collective.
    ///
    /// In a group of two ranks, a barrier that one of them has passed does not fail on the other
    /// one, even if the first one is lost right afterwards. In larger groups, the last signal of a
    /// third rank can still be under way then, and is not waited for. To leave in order, call
    /// [`close`](Self::close).
    ///
    /// # Errors
    /// The reason why the group has ended, or the rank that did not come in time.
    pub fn barrier(&mut self) -> Result<(), Error> {
        self.prepare_barrier()?.run()
    }

    fn prepare_barrier(&mut self) -> Result<&mut Operation<u8>, Error> {
        let barrier = match self.barrier.take() {
            Some(barrier) => barrier,
            None => {
                let barrier = self.all_gather::<u8>(0).algorithm(Algorithm::Direct).chunks(1);
                barrier.named("barrier").prepare()?
            }
        };
        Ok(self.barrier.insert(barrier))
    }

    /// Sends `mine` to every rank and returns what each rank sent, in rank order. Collective.
    ///
    /// It is for the control plane of a caller, such as the addresses of another library: the
    /// bytes, at most 4 MiB from each rank (4,190,208 bytes) and 16 MiB in exchanges of several
    /// groups at once, pass through the hub. [`all_gather`](Self::all_gather) is for data.
    ///
    /// ```
    /// # use peerlane::bootstrap::{Bootstrap, in_process};
    /// # use peerlane::{Group, host};
    /// # in_process::run(3, |bootstrap| {
    /// # let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
    /// # let mut group = Group::open(bootstrap, fabric)?;
    /// let mine = vec![7; group.rank().index()];
    /// assert_eq!(group.exchange(&mine)?, [vec![], vec![7], vec![7, 7]]);
    /// # group.close()
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    /// The reason why the group has ended, or the rank that did not come in time.
    pub fn exchange(&mut self, mine: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        let offer = Offer::default().blob(mine.to_vec());
        let offers = agree(&self.runtime, "exchange", Ok(offer), Deadline::after(self.timeout()))?;
        Ok(offers.into_iter().flat_map(|offer| offer.blobs).collect())
    }

    /// Opens a new group of the ranks that remain after a rank was lost.
    ///
    /// Every remaining rank calls it. The ranks keep their order and are numbered from 0, and the
    /// topology, timeout and other options stay. The rank that the [abort
    /// record](Self::abort_record) names does not take part. Other ranks do if their process runs
    /// and they call this before half of the [timeout](Self::timeout) has passed; whoever calls
    /// later gets an error. After a partition of the network, the ranks of each part can form a
    /// group, so compare the number of ranks with what the program needs.
    ///
    /// Operations, windows and memory of the old group do not belong to the new one. A call that
    /// failed, because another rank was lost meanwhile, can be repeated.
    ///
    /// ```
    /// use peerlane::bootstrap::{Bootstrap, in_process};
    /// use peerlane::{Group, host};
    ///
    /// let results = in_process::run(3, |bootstrap| {
    ///     let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
    ///     let mut group = Group::open(bootstrap, fabric)?;
    ///     if group.rank().0 == 1 {
    ///         return Ok(None); // The group is dropped, and the others lose this rank.
    ///     }
    ///     let error = group.barrier().unwrap_err();
    ///     let mut group = group.shrink()?;
    ///     group.barrier()?;
    ///     let new = (group.rank().0, group.ranks());
    ///     group.close()?;
    ///     Ok(Some((error.peer().map(|peer| peer.0), new)))
    /// });
    /// assert_eq!(results.unwrap(), [Some((Some(1), (0, 2))), None, Some((Some(1), (1, 2)))]);
    /// ```
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if the group has not ended; the reason why
    /// the group has ended, if it names this rank; [`Aborted`](ErrorKind::Aborted) if this rank
    /// called too late; [`Timeout`](ErrorKind::Timeout) and [`PeerLost`](ErrorKind::PeerLost),
    /// naming the rank by its number in this group until the new one is formed, and by its number
    /// there afterwards; [`Unavailable`](ErrorKind::Unavailable) if the bootstrap or the fabric
    /// cannot be opened again, or the group was [split](Self::split) from another one.
    pub fn shrink(&self) -> Result<Self, Error> {
        let Some(record) = self.abort_record() else {
            let text = "shrink: the group has not ended; only a group that lost a rank or was aborted can shrink";
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        };

        let old = &self.runtime.life.bootstrap;
        if record.peer == Some(old.rank()) {
            return Err(record.to_error(old.rank()));
        }

        let deadline = Deadline::after(self.runtime.life.timeout);
        let excluded: Vec<_> = record.peer.into_iter().collect();
        let bootstrap = old.shrink(&excluded, deadline)?;
        let (rank, ranks) = (bootstrap.rank(), bootstrap.ranks());
        let node = self.setup.topology.node(old.rank()).to_le_bytes();
        let nodes = bootstrap.exchange("shrink", &node, deadline)?;

        let reopen = |fabric: &DynFabric| {
            fabric.reopen(rank, ranks).map_err(|error| Error::of_fabric("reopen a fabric", error))
        };
        let setup = &self.setup;
        let network = setup.network.as_ref().map(|network| match network::wrapper(network) {
            Some(staged) => staged.with_network(reopen),
            None => reopen(network),
        });

        GroupOptions::default()
            .inherited_engine(setup.engine.clone())
            .timeout(self.runtime.life.timeout)
            .strict(setup.strict)
            .beside_compute(setup.beside_compute)
            .topology(Topology::by_key(&nodes)?)
            .selected(setup.selection.device, setup.selection.reasons.clone())
            .measured_links(setup.given_links.clone())
            .open_with(bootstrap, reopen(&setup.fabric)?, network.transpose()?)
    }

    /// Closes the group once every rank has called `close`; its operations can no longer start.
    /// Collective.
    ///
    /// It releases what the group alone holds: its connections, its port, and its part of the heap
    /// of the group from which it was split. Operations that outlive the group keep their own
    /// memory. All ranks can open the next group at the same address at once: a rank that is early
    /// waits for those that have still to leave this one.
    ///
    /// Peers treat a group that is dropped without being closed as lost.
    ///
    /// # Errors
    /// The reason why the group had ended, or the rank that did not come in time.
    pub fn close(mut self) -> Result<(), Error> {
        self.barrier = None;
        self.immediate.clear();
        self.runtime.life.check()?;

        let deadline = Deadline::after(self.runtime.life.timeout);
        self.runtime.finish_children(deadline);
        // Messages on streams may be in flight, because the agreement waits for those of the host
        // only.
        let is_quiet = !self.runtime.has_channels() && !self.heap.has_leaked();
        let offer = Offer::default().blob(vec![u8::from(is_quiet)]);
        let offers = agree(&self.runtime, "close", Ok(offer), deadline)?;
        if !self.setup.is_split && offers.iter().all(|offer| offer.blobs == [[u8::from(true)]]) {
            // SAFETY: every rank has completed its starts before it has taken part in the agreement
            // (`agree`), and says there that it has no channel and none that was dropped with
            // messages in flight. The replays of graphs are complete, which the callers of
            // `capturable` guarantee.
            unsafe { self.heap.allow_reuse_of_flags() };
        }

        self.runtime.end_children(Close::Together);
        let life = &self.runtime.life;
        life.close(Closed::new(Close::Together));
        let left = life.bootstrap.leave(deadline);
        life.note_left();
        left
    }
}

impl Setup {
    /// Returns the kind of engines that the group names, if it names one.
    fn named_engine(&self) -> Option<&EngineKind> {
        let name = self.engine.as_deref()?;
        self.engines.iter().find(|engine| engine.is_named(name))
    }

    fn fabrics<'s>(&'s self, runtime: &'s Runtime) -> Fabrics<'s> {
        let life = &runtime.life;
        let (rank, network) = (life.bootstrap.rank(), self.network.as_deref());
        let Self { fabric, topology, .. } = self;
        // The fabrics count the ranks of the first group.
        Fabrics { local: fabric, network, topology, rank, fabric_ranks: &life.identity.first_ranks }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.barrier = None;
        self.immediate.clear();

        // A forked child leaves the group to its parent.
        if self.runtime.driver.is_of_parent() {
            return;
        }

        let life = &self.runtime.life;
        let is_open = life.check().is_ok();
        let how = "its group was dropped without a call of `close`";
        let record = AbortRecord::lost(self.rank(), how);
        if is_open {
            // If nobody can be told, there is nobody left.
            let _ = life.bootstrap.abort(&record.encode());
        }

        self.runtime.end_children(Close::Alone);
        self.runtime.end(Closed::new(Close::Alone));
        if is_open {
            life.adopt(record);
        }
    }
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Group")
            .field("rank", &self.rank())
            .field("topology", &self.setup.topology)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::thread;

    use peerlane_host as host;
    use peerlane_test_support::ends_in_child;

    use super::*;
    use crate::bootstrap::in_process;

    #[test]
    fn a_forked_child_waits_for_no_lock_of_its_parent() {
        let bootstrap = in_process::group(1).unwrap().remove(0);
        let mut group = Group::open(bootstrap, host::Fabric::open(Rank(0), 1).unwrap()).unwrap();
        let window = group.window::<u32>(8).unwrap();
        let channel = group.channel(&window, 1).unwrap();
        let gather = group.all_gather::<u32>(8).prepare().unwrap();

        // Another thread of the parent holds the lock of the list when the process is forked.
        let (held, forked) = (Barrier::new(2), Barrier::new(2));
        let runtime = Arc::clone(&group.runtime);
        let mut copies = [Some((channel, gather, group))];
        let is_ended = thread::scope(|scope| {
            scope.spawn(|| {
                runtime.work.run_locked(|| {
                    held.wait();
                    forked.wait();
                });
            });
            held.wait();
            let is_ended = ends_in_child(|| drop(copies[0].take()));
            forked.wait();
            is_ended
        });
        assert!(is_ended);

        let [copies] = copies;
        let (channel, gather, mut group) = copies.unwrap();
        drop(gather);
        group.close_channel(channel).unwrap();
        group.close().unwrap();
    }
}
