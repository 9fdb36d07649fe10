//! Runs collectives on any memory of the caller, without an operation that the caller prepares.
//!
//! | file | holds |
//! | --- | --- |
//! | `memory.rs` | the memory that a call reads and writes |
//! | `shape.rs` | the lengths of the blocks, which follow from that memory |
//! | `sides.rs` | what a call uses directly and what it copies |
//! | `staging.rs` | memory for copies, and the copies |
//! | `kept.rs` | the operations that are kept for the next calls |
//! | `splits.rs` | all-to-alls in which each pair of ranks has a length |
//! | `start.rs` | the starts of these operations |

mod kept;
mod memory;
mod shape;
mod sides;
mod splits;
mod staging;
mod start;

use std::cmp::Reverse;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use peerlane_hal::{Deadline, ErrorKind, Stream};

pub use memory::{Input, Output, WindowPart};
pub use start::ImmediateStart;

use self::kept::{Kept, Key, Prepared, RecentMap, Start};
use self::memory::Memory;
use self::shape::{Lens, Shape, invalid};
use self::sides::{Placed, Sides};
use self::staging::Staging;
use self::start::OpenCall;
use super::Group;
use super::agreement::{Offer, agree};
use super::engines::EngineKind;
use super::operation::{BlockLens, Part, UntypedOperation};
use super::runtime::Runtime;
use super::stats::{CallCounts, CallPath};
use super::window::{Inner, Window};
use crate::collective::Collective;
use crate::element::{DType, Operator, Untyped};
use crate::error::Error;

/// The number of operations that a group keeps, besides those that graphs have recorded.
const OPERATIONS_MAX: usize = 64;
/// The number of lengths and places of one operation that ranks need not compare again.
const STARTS_MAX: usize = 256;
/// Reductions of fewer elements share one operation.
const REDUCTION_LEN_MIN: usize = 1 << 12;
/// Copies with blocks of up to so many bytes share one operation, if one launch can make a start.
const SHORT_BYTES: usize = 4 << 20;
/// Reductions of up to so many bytes share one operation, if one launch can make a start. Each
/// operation reserves room on the device for its blocks of threads, of which there is little.
const REDUCTION_CLASSES: [usize; 2] = [256 << 10, SHORT_BYTES];
/// Blocks of fewer elements share one operation if blocks have lengths of their own.
const COUNT_MIN: usize = 1 << 6;

/// A collective call that needs no preparation by the caller; [`Group::immediate`] describes one.
///
/// The first call of a kind prepares an operation, and the group keeps it for the next calls. One
/// operation serves all lengths and places in its windows. The group keeps the 64 operations that
/// were used last, and [`Group::stats`] counts the calls that found theirs.
///
/// # Memory
///
/// A call takes any memory of this rank. A [part of a window](Window::part) is used without a copy.
/// All ranks then name the part at the same place, also those whose input or output the collective
/// does not need. Other memory is copied to and from memory of the group, on the host by the
/// calling thread and on a stream by an engine in the order of the stream. Ranks must agree for
/// each side whether it is in a window.
///
/// # Lengths
///
/// The lengths of the blocks follow from those of the input and the output;
/// [`counts`](Self::counts) sets lengths that differ between ranks. Ranks compare the lengths and
/// places of each call. Where the host polls the flags, they do so in the start and before bytes
/// move, at no cost. On streams and where engines wait for flags, they exchange a message when an
/// operation is used with new lengths or places, and none when it is used with them again; the 256
/// last ones of each operation count as known. A rank that differs is an error on all ranks, which
/// names it.
///
/// ```
/// use peerlane::bootstrap::{Bootstrap, in_process};
/// use peerlane::collective::Collective;
/// use peerlane::{Group, Operator, host};
///
/// in_process::run(2, |bootstrap| {
///     let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
///     let mut group = Group::open(bootstrap, fabric)?;
///     let rank = group.rank().0;
///
///     let mut gathered = [0_u32; 4];
///     group.immediate(Collective::AllGather).run(&[rank, 7], &mut gathered)?;
///     assert_eq!(gathered, [0, 7, 1, 7]);
///
///     let mut largest = vec![rank as f32; 1000];
///     group.immediate(Collective::AllReduce).operator(Operator::Max).run_in_place(&mut largest)?;
///     assert_eq!(largest, [1.0; 1000]);
///     group.close()
/// })
/// .unwrap();
/// ```
#[must_use = "the call is made by `run` and its siblings"]
pub struct Immediate<'g> {
    group: &'g mut Group,
    collective: Collective,
    operator: Operator,
    counts: Option<Vec<usize>>,
    /// What this rank sends to each rank and receives from it, if each pair has a length.
    splits: Option<[Vec<usize>; 2]>,
    beside_compute: bool,
    timeout: Duration,
    captures: bool,
    /// Whether the call may exchange messages with the other ranks, besides those of the start.
    may_exchange: bool,
}

/// What a group keeps for immediate calls.
pub(super) struct Calls {
    /// Declared before `staging`, whose memory the operations use.
    operations: RecentMap<Key, Entry>,
    /// Operations that graphs have recorded, which stay, because a graph can be replayed at any
    /// time.
    recorded: RecentMap<Key, Entry>,
    /// The operations of calls with splits, by the number of the window that holds their memory.
    with_splits: RecentMap<u64, Arc<Kept>>,
    staging: Staging,
    /// The last start on the host, until it is complete.
    open: Option<Arc<OpenCall>>,
    /// Whether calls on streams may not be complete.
    has_calls_on_streams: bool,
    counts: CallCounts,
    /// The calls of operations that were dropped.
    past_paths: Vec<CallPath>,
}

/// An operation that is kept, and the calls that it has made.
struct Entry {
    operation: Arc<Kept>,
    /// The lengths and places that the ranks have compared.
    compared: RecentMap<Start, ()>,
    /// The lengths and places of the last call, and whether the ranks have compared them by
    /// messages.
    last: Option<(Start, bool)>,
    /// The number of calls that used each plan of the operation.
    calls: Vec<u64>,
    /// The index of the plan that the last call used.
    plan: usize,
}

impl Entry {
    fn new(operation: UntypedOperation) -> Self {
        Self {
            operation: Kept::new(Prepared::Operation(Box::new(operation))),
            compared: RecentMap::new(STARTS_MAX),
            last: None,
            calls: Vec::new(),
            plan: 0,
        }
    }

    /// Counts a call whose lengths and places are set.
    fn count_call(&mut self) {
        if self.calls.len() <= self.plan {
            self.calls.resize(self.plan + 1, 0);
        }
        self.calls[self.plan] += 1;
    }

    /// Adds the calls of the operation to `paths`.
    fn add_paths(&self, paths: &mut Vec<CallPath>) {
        let operation = self.operation.lock();
        let report = operation.report();

        for (plan, calls) in self.calls.iter().enumerate().filter(|(_, calls)| **calls > 0) {
            // The plan of the longest starts comes first, then those that the report lists.
            let shorter = plan.checked_sub(1).and_then(|index| report.shorter.get(index));
            let (form, algorithm, engine) = match shorter {
                Some(range) => (range.form, range.algorithm, range.engine.clone()),
                None => (report.choice.form, report.algorithm, report.choice.engine.clone()),
            };

            let collective = report.collective.name();
            CallPath { collective, form, algorithm, engine, calls: *calls }.add_to(paths);
        }
    }

    /// Sets the lengths and places of the next start, which ranks have compared or compare in the
    /// start. Returns false if they would have to exchange messages but may not.
    fn set_start(
        &mut self,
        runtime: &Runtime,
        key: &Key,
        start: Start,
        when: When,
        (timeout, may_exchange): (Duration, bool),
    ) -> Result<bool, Error> {
        let mut operation = self.operation.lock();
        operation.set_timeout(timeout);

        // Where the host does not look at the flags before bytes move, messages compare the starts.
        let needs_comparison = when != When::OnHost || !operation.compares_before_copies();
        if let Some((last, is_compared)) = &self.last
            && *last == start
            && (*is_compared || !needs_comparison)
        {
            return Ok(true);
        }

        if needs_comparison && self.compared.find(&start).is_none() {
            if !may_exchange {
                return Ok(false);
            }
            let label = format!("an immediate {}", key.collective);
            let deadline = Deadline::after(timeout);
            agree(runtime, &label, Ok(compared_fields(key, &start)), deadline)?;
            self.compared.insert(start.clone(), ());
        }

        let resized = resize(&mut operation, key, &start);
        resized.inspect_err(|error| operation.note_refusal(error))?;
        self.plan = operation.current_plan();
        drop(operation);
        self.last = Some((start, needs_comparison));
        Ok(true)
    }
}

impl Default for Calls {
    fn default() -> Self {
        Self {
            operations: RecentMap::new(OPERATIONS_MAX),
            recorded: RecentMap::new(usize::MAX),
            with_splits: RecentMap::new(OPERATIONS_MAX),
            staging: Staging::default(),
            open: None,
            has_calls_on_streams: false,
            counts: CallCounts::default(),
            past_paths: Vec::new(),
        }
    }
}

impl Calls {
    pub(super) fn counts(&self) -> CallCounts {
        CallCounts {
            operations: self.operations.len() + self.recorded.len() + self.with_splits.len(),
            copy_bytes: self.staging.bytes(),
            ..self.counts
        }
    }

    /// Returns how the calls ran, from the path of the most calls on.
    pub(super) fn paths(&self) -> Vec<CallPath> {
        let mut paths = self.past_paths.clone();
        for entry in self.operations.values().chain(self.recorded.values()) {
            entry.add_paths(&mut paths);
        }

        // The map of operations has no order.
        paths.sort_by_key(|path| (Reverse(path.calls), path.collective, path.algorithm.name()));
        paths
    }

    /// Returns the operations among which that of a key is kept.
    fn kept(&mut self, key: &Key) -> &mut RecentMap<Key, Entry> {
        if key.is_recorded { &mut self.recorded } else { &mut self.operations }
    }

    /// Counts a call.
    fn count(&mut self, is_known: bool, is_staged: bool) {
        self.counts.calls += 1;
        self.counts.hits += u64::from(is_known);
        self.counts.copied += u64::from(is_staged);
    }

    /// Returns whether an operation of a collective is kept, whatever its root.
    fn keeps(&self, collective: Collective) -> bool {
        let mut keys = self.operations.keys().chain(self.recorded.keys());
        keys.any(|key| key.collective.name() == collective.name())
    }

    /// Waits until the operations and the copies have nothing left to do.
    fn settle(&self) -> Result<(), Error> {
        let entries = self.operations.values().chain(self.recorded.values());
        let mut kept = entries.map(|entry| &entry.operation).chain(self.with_splits.values());
        kept.try_for_each(|operation| operation.lock().settle())?;
        self.staging.copier().settle()
    }

    /// Drops the operations over a window, which is released.
    pub(super) fn forget_window(&mut self, number: u64) {
        for map in [&mut self.operations, &mut self.recorded] {
            for entry in map.remove_where(|key| key.windows.contains(&Some(number))) {
                entry.add_paths(&mut self.past_paths);
            }
        }
        self.with_splits.remove_where(|window| *window == number);
    }

    /// Drops all operations and the memory for copies.
    pub(super) fn clear(&mut self) {
        // A start that nobody has waited for ends with its operation.
        self.open = None;
        self.past_paths = self.paths();
        self.operations.clear();
        self.recorded.clear();
        self.with_splits.clear();
        self.staging = Staging::default();
    }
}

impl Group {
    /// Describes a collective call on any memory, without a preparation by the caller.
    ///
    /// [`Immediate`] has an example, and says what the call does with memory.
    pub fn immediate(&mut self, collective: Collective) -> Immediate<'_> {
        let beside_compute = self.setup.beside_compute;
        let timeout = self.timeout();
        Immediate {
            group: self,
            collective,
            operator: Operator::default(),
            counts: None,
            splits: None,
            beside_compute,
            timeout,
            captures: false,
            may_exchange: true,
        }
    }
}

impl Immediate<'_> {
    /// Sets how a reduction combines contributions; the default is their sum.
    pub fn operator(mut self, operator: Operator) -> Self {
        self.operator = operator;
        self
    }

    /// Sets a length for the block of each rank, in elements, as
    /// [`BlockLens`](super::BlockLens).
    ///
    /// Each further list of lengths is another operation that is kept; lengths below the same
    /// powers of two share one.
    pub fn counts(mut self, counts: &[usize]) -> Self {
        self.counts = Some(counts.to_vec());
        self
    }

    /// Sets the elements that this rank sends to each rank and receives from it in an all-to-all,
    /// whose blocks then follow each other in the input and in the output.
    ///
    /// Every rank tells the others its lists in each call, as in an
    /// [`AllToAllV`](super::AllToAllV), which says what that costs. So the host waits for the other
    /// ranks, even if the call is on a stream, and the call cannot be recorded. What a rank sends
    /// to another must be what the other one receives from it.
    pub fn splits(mut self, send: &[usize], receive: &[usize]) -> Self {
        self.splits = Some([send.to_vec(), receive.to_vec()]);
        self
    }

    /// Sets whether the call runs beside kernels of the caller, as
    /// [`OperationBuilder::beside_compute`](super::OperationBuilder::beside_compute).
    pub fn beside_compute(mut self, beside_compute: bool) -> Self {
        self.beside_compute = beside_compute;
        self
    }

    /// Sets how long the call may take before the group ends; the default is the timeout of the
    /// group.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Lets [`run_on`](Self::run_on) record the call into a graph, if the stream captures.
    ///
    /// The operation and the memory for copies then stay until the group is closed or dropped.
    /// Calls that are recorded share the memory for copies, so replays of their graphs must follow
    /// each other.
    ///
    /// # Safety
    /// All replays of such graphs are complete before the group is closed or dropped, or a window
    /// that the call uses is released. While a replay is in progress, the host does not access the
    /// memory of the call.
    pub unsafe fn capturable(mut self) -> Self {
        self.captures = true;
        self
    }

    /// Makes the call and waits until the output is complete. Collective.
    ///
    /// `()` stands for an input or an output that this rank does not have. The array of a broadcast
    /// is the output, and on the root the input or the output.
    ///
    /// # Errors
    /// [`InvalidArgument`](peerlane_hal::ErrorKind::InvalidArgument) if memory is missing or has
    /// another length or type than the collective needs;
    /// [`Mismatch`](peerlane_hal::ErrorKind::Mismatch), naming the rank, if another rank makes a
    /// different call; [`Unavailable`](peerlane_hal::ErrorKind::Unavailable) if the group is strict
    /// and the call needs copies; as
    /// [`OperationBuilder::prepare`](super::OperationBuilder::prepare) and
    /// [`Operation::run`](super::Operation::run).
    pub fn run<'m>(
        self,
        input: impl Into<Input<'m>>,
        output: impl Into<Output<'m>>,
    ) -> Result<(), Error> {
        // SAFETY: the memory is borrowed, or its owner has promised to keep it, until this function
        // returns. If the wait fails, nothing is copied any more.
        unsafe { self.start(input.into(), output.into()) }?.wait()
    }

    /// Makes the call in place and waits until it is complete. Collective.
    ///
    /// `array` is the input and the output. In an all-gather it is the output, and the block of
    /// this rank in it is the input. Reductions add in the same order as out of place.
    ///
    /// # Errors
    /// As [`run`](Self::run); [`InvalidArgument`](peerlane_hal::ErrorKind::InvalidArgument) if the
    /// collective has an input and an output of different lengths.
    pub fn run_in_place<'m>(self, array: impl Into<Output<'m>>) -> Result<(), Error> {
        let output = array.into();
        match self.input_in(&output) {
            Ok(input) => self.run(input, output),
            Err(error) => Err(self.group.refuse_immediate(self.collective, error)),
        }
    }

    /// Enqueues the call on a stream and returns at once. Collective.
    ///
    /// The call comes after the work that the stream holds now, and before work that is enqueued
    /// next. The host waits for other ranks only if the call prepares an operation or compares new
    /// lengths. For deadline and progress see
    /// [`Operation::start_on`](super::Operation::start_on). The output is defined if the group
    /// [has not ended](Group::abort_record) after the stream was synchronised.
    ///
    /// # Errors
    /// As [`run`](Self::run) and [`Operation::start_on`](super::Operation::start_on).
    pub fn run_on<S: Stream>(
        self,
        stream: &S,
        input: impl Into<Input<'static>>,
        output: impl Into<Output<'static>>,
    ) -> Result<(), Error> {
        // The memory lives as long as the stream needs it: it is in a window that the kept
        // operation uses, borrowed for ever, or promised by its owner.
        start::try_on_stream(self, stream, input.into().memory, output.into().memory).map(drop)
    }

    /// Enqueues the call in place on a stream, as [`run_in_place`](Self::run_in_place) and
    /// [`run_on`](Self::run_on). Collective.
    ///
    /// # Errors
    /// As these.
    pub fn run_in_place_on<S: Stream>(
        self,
        stream: &S,
        array: impl Into<Output<'static>>,
    ) -> Result<(), Error> {
        let output = array.into();
        match self.input_in(&output) {
            Ok(input) => self.run_on(stream, input, output),
            Err(error) => Err(self.group.refuse_immediate(self.collective, error)),
        }
    }

    /// Starts the call and returns a handle by which the caller waits for it. Collective.
    ///
    /// The next immediate call on the host first completes this one.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    ///
    /// # Safety
    /// The memory stays allocated and nobody else accesses it until [`ImmediateStart::wait`] has
    /// returned, or the handle and the group were dropped.
    pub unsafe fn start(
        self,
        input: Input<'_>,
        output: Output<'_>,
    ) -> Result<ImmediateStart, Error> {
        let start = start::try_on_host(self, input.memory, output.memory)?;
        Ok(start.expect("the call may exchange messages"))
    }

    /// Starts the call as [`start`](Self::start), unless that would exchange messages with the
    /// other ranks. Returns `None` then, and nothing has happened.
    ///
    /// It is for callers that make calls that can take long in another way, such as on another
    /// thread. All ranks then do so.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    ///
    /// # Safety
    /// As [`start`](Self::start).
    pub unsafe fn try_start(
        mut self,
        input: Input<'_>,
        output: Output<'_>,
    ) -> Result<Option<ImmediateStart>, Error> {
        self.may_exchange = false;
        start::try_on_host(self, input.memory, output.memory)
    }

    /// Enqueues the call as [`run_on`](Self::run_on), unless that would exchange messages with the
    /// other ranks. Returns whether it did.
    ///
    /// # Errors
    /// As [`run_on`](Self::run_on).
    pub fn try_run_on<S: Stream>(
        mut self,
        stream: &S,
        input: impl Into<Input<'static>>,
        output: impl Into<Output<'static>>,
    ) -> Result<bool, Error> {
        self.may_exchange = false;
        let (input, output) = (input.into().memory, output.into().memory);
        start::try_on_stream(self, stream, input, output)
    }

    /// Returns the input of a call in place.
    fn input_in<'m>(&self, array: &Output<'_>) -> Result<Input<'m>, Error> {
        let Some(memory) = array.memory.clone() else { return Ok(Input::from(())) };
        let (rank, ranks) = (self.group.rank(), self.group.ranks());

        let memory = match self.collective {
            Collective::AllGather => {
                let counts = self.counts.as_deref();
                let (collective, output) = (self.collective, Some(&memory));
                let shape = Shape::find(collective, (rank, ranks), counts, None, output)?;
                memory.part(shape.before(rank), shape.input_len(rank))
            }
            Collective::Gather { .. } | Collective::Scatter { .. } | Collective::ReduceScatter => {
                return Err(invalid(format!(
                    "the call is in place, expected an input and an output apart in {}",
                    self.collective.with_article()
                )));
            }
            _ => memory,
        };
        Ok(Input::new(Some(memory)))
    }
}

/// A call whose operation is prepared and has the lengths and places of the call.
struct Ready {
    operation: Arc<Kept>,
    placed: Placed,
    is_staged: bool,
}

/// When a call runs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum When {
    /// While the host waits.
    OnHost,
    OnStream,
    /// In the replays of a graph.
    Recorded,
}

impl Immediate<'_> {
    /// Finds or prepares the operation of a call, and sets its lengths and places. Returns `None`
    /// if it would have to exchange messages but may not.
    fn ready(
        &mut self,
        input: Option<Memory>,
        output: Option<Memory>,
        when: When,
    ) -> Result<Option<Ready>, Error> {
        self.group.runtime.life.check()?;
        if self.splits.is_some() {
            return self.ready_with_splits(input, output, when);
        }
        let (dtype, shape, sides) = match self.find_sides(input, output) {
            Ok(found) => found,
            Err(error) => return self.refused(error),
        };

        let size = dtype.bytes();
        let staged_lens = staged_lens(&shape, &sides);
        let needs = Shape { lens: staged_lens.clone(), ..shape.clone() }.longest();
        let needs = sides.staged_bytes(needs.map(|len| len.saturating_mul(size) as u64));
        let is_staged = sides.are_staged();
        let lease = match is_staged {
            false => None,
            true => match self.lease(needs, when)? {
                Some(window) => Some(window),
                None => return Ok(None),
            },
        };

        let is_in_place = sides.is_in_place();
        let placed = sides.place(lease.as_ref(), needs[0]);
        if placed.copies_device_memory() {
            self.group.staging_engine()?;
        }

        let has_launches = self.has_launches();
        let capacity = match capacity(&shape, dtype, staged_lens, &placed, has_launches) {
            Ok(capacity) => capacity,
            Err(error) => return self.refused(error),
        };

        let numbers = placed.windows.each_ref().map(|one| one.as_ref().map(|one| one.number));
        let is_reduction = self.collective.is_reduction();
        let key = Key {
            collective: self.collective,
            dtype,
            operator: is_reduction.then_some(self.operator),
            is_in_place,
            is_recorded: when == When::Recorded,
            beside_compute: self.beside_compute,
            windows: numbers,
            capacity,
        };
        let begins = placed.begins.map(|begin| usize::try_from(begin).unwrap_or(usize::MAX) / size);
        let start = Start { lens: shape.lens, begins };

        let found = self.operation(&key, start, &placed, when)?;
        let Some((operation, is_known)) = found else { return Ok(None) };
        self.group.immediate.count(is_known, is_staged);
        Ok(Some(Ready { operation, placed, is_staged }))
    }

    /// Returns whether a kernel can make the starts of the group, equal on all ranks.
    fn has_launches(&self) -> bool {
        self.group.engines().iter().any(EngineKind::is_fused)
    }

    /// Checks the arguments of the call, and decides where its input and output are.
    fn find_sides(
        &self,
        input: Option<Memory>,
        output: Option<Memory>,
    ) -> Result<(DType, Shape, Sides), Error> {
        let (collective, counts) = (self.collective, self.counts.as_deref());
        let (rank, ranks) = (self.group.rank(), self.group.ranks());
        let is_broadcast = matches!(collective, Collective::Broadcast { .. });
        collective.check(ranks, is_broadcast).map_err(invalid)?;

        let given = [input.as_ref(), output.as_ref()];
        let dtype = match given {
            [Some(input), Some(output)] => {
                output.check_elements(input)?;
                input.dtype
            }
            [Some(memory), None] | [None, Some(memory)] => memory.dtype,
            [None, None] => {
                let text = "the call has neither input nor output, expected one of them at least";
                return Err(invalid(text.to_owned()));
            }
        };

        self.check_windows(given)?;
        let shape = Shape::find(collective, (rank, ranks), counts, given[0], given[1])?;
        let unit = given.into_iter().flatten().map(|memory| memory.unit).next().unwrap_or(1);
        let sides = Sides::new(&shape, rank, (input, output), self.has_launches())?;
        if self.group.setup.strict && sides.are_staged() {
            let text = "strict is set, but the call copies memory that is not in a window; use \
                        parts of windows, or turn strict off";
            return Err(Error::new(ErrorKind::Unavailable, text));
        }
        Ok((dtype, shape.in_units(unit), sides))
    }

    /// Refuses windows of other groups. Windows are compared by number later, and each group has
    /// its own numbers.
    fn check_windows(&self, given: [Option<&Memory>; 2]) -> Result<(), Error> {
        let windows = given.into_iter().flatten().filter_map(|memory| memory.location.window());
        let mut windows = windows.map(|(window, _)| window);
        match windows.find(|window| !Arc::ptr_eq(&window.runtime, &self.group.runtime)) {
            None => Ok(()),
            Some(_) => Err(invalid(
                "the window belongs to another group; open it with this group".to_owned(),
            )),
        }
    }

    /// Returns memory for a staged input and a staged output of these lengths, or `None` if it
    /// would have to grow but may not.
    fn lease(
        &mut self,
        [input, output]: [u64; 2],
        when: When,
    ) -> Result<Option<Arc<Inner>>, Error> {
        let bytes = input.next_multiple_of(staging::ALIGN_BYTES).saturating_add(output);
        let is_recorded = when == When::Recorded;
        let leased = self.group.immediate.staging.leased_window(bytes, is_recorded);
        match leased {
            Some(window) => Ok(Some(window)),
            None if !self.may_exchange => Ok(None),
            None => self.group.grow_lease(bytes, is_recorded).map(Some),
        }
    }

    /// Returns the operation of a key with the lengths and places of `start`, and whether it was
    /// kept. Returns `None` if it would have to exchange messages but may not.
    fn operation(
        &mut self,
        key: &Key,
        start: Start,
        placed: &Placed,
        when: When,
    ) -> Result<Option<(Arc<Kept>, bool)>, Error> {
        let mut is_known = true;
        loop {
            let (group, limits) = (&mut *self.group, (self.timeout, self.may_exchange));
            if let Some(entry) = group.immediate.kept(key).find(key) {
                let is_set = entry.set_start(&group.runtime, key, start, when, limits)?;
                if is_set {
                    entry.count_call();
                }
                return Ok(is_set.then(|| (Arc::clone(&entry.operation), is_known)));
            }

            if !self.may_exchange {
                return Ok(None);
            }
            let entry = Entry::new(self.prepare(key, placed)?);
            is_known = false;

            // Its memory can be used again when all ranks have dropped it.
            let displaced = self.group.immediate.kept(key).insert(key.clone(), entry);
            if let Some(displaced) = displaced {
                displaced.add_paths(&mut self.group.immediate.past_paths);
            }
        }
    }

    /// Prepares an operation for all calls with this key.
    fn prepare(&mut self, key: &Key, placed: &Placed) -> Result<UntypedOperation, Error> {
        let (collective, ranks) = (key.collective, self.group.ranks());
        let lens = match &key.capacity {
            Lens::Equal(len) => BlockLens::from(*len),
            Lens::ByRank(lens) => BlockLens::from(&lens[..]),
        };
        let [input, output] = placed.windows.each_ref().map(|window| {
            window.as_ref().map(|window| Window::<Untyped>::over(Arc::clone(window)))
        });

        let mut builder = self.group.untyped_operation(collective, key.dtype, lens);
        builder = builder.resizable().check_starts(true).beside_compute(key.beside_compute);
        builder = builder.timeout(self.timeout);
        if let Some(operator) = key.operator {
            builder = builder.operator(operator);
        }
        if let Some(output) = &output {
            builder = builder.output_into(output, 0);
        }
        builder = match &input {
            None => builder.in_place(),
            Some(input) => {
                // In one window, the longest input follows the longest output.
                let longest = Shape { collective, ranks, lens: key.capacity.clone() }.longest();
                let is_shared = key.windows[0] == key.windows[1];
                builder.input_from(input, if is_shared { longest[1] } else { 0 })
            }
        };
        if key.is_recorded {
            // SAFETY: the caller of `Immediate::capturable` has promised it, and the group keeps
            // the operation until it is closed or dropped.
            builder = unsafe { builder.capturable() };
        }
        builder.prepare()
    }

    /// Tells the other ranks that this rank refuses the call, and returns the error. Returns `None`
    /// if it would have to exchange messages but may not.
    ///
    /// If an operation of the collective is kept, the others may only start it. They then wait for
    /// this rank, and learn of the refusal when they ask what it waits for. Otherwise they exchange
    /// messages to prepare one.
    fn refused<R>(&mut self, error: Error) -> Result<Option<R>, Error> {
        if self.group.note_immediate_refusal(self.collective, &error) {
            return Err(error);
        }
        match self.may_exchange {
            true => Err(self.group.refuse(error)),
            false => Ok(None),
        }
    }
}

impl Group {
    /// Tells the other ranks that this rank refuses an immediate call, and returns the error.
    ///
    /// It is for callers that check arguments before they make the call, such as an interface for
    /// another language. The other ranks return an error that names this rank and has the text of
    /// `error`: at once if the call exchanges messages, and otherwise when they have waited for
    /// this rank for long.
    pub fn refuse_immediate(&mut self, collective: Collective, error: Error) -> Error {
        match self.note_immediate_refusal(collective, &error) {
            true => error,
            false => self.refuse(error),
        }
    }

    /// Takes part in a call with [splits](Immediate::splits) that this rank refuses, and returns
    /// the error. The other ranks return an error that names this rank and has the text of `error`.
    pub fn refuse_splits(&mut self, error: Error) -> Error {
        let call = self.immediate(Collective::AllToAll);
        // If the refusal fails, the group has ended.
        call.with_splits_refused(error)
    }

    /// Tells the other ranks of a refusal as [`refuse_immediate`](Self::refuse_immediate), unless
    /// that would exchange messages. Returns whether it did.
    pub fn note_immediate_refusal(&self, collective: Collective, error: &Error) -> bool {
        let is_kept = self.immediate.keeps(collective);
        if is_kept {
            self.note_refusal(error);
        }
        is_kept
    }

    /// Waits until all immediate calls of this rank are complete, also those on streams, so that
    /// the host can use their memory.
    ///
    /// # Errors
    /// The reason why the group has ended; as [`ImmediateStart::wait`].
    pub fn finish_immediate(&mut self) -> Result<(), Error> {
        self.finish_open_call()?;
        self.immediate.settle()?;
        self.immediate.has_calls_on_streams = false;
        Ok(())
    }

    /// Completes the last immediate call on the host, whose memory the next one uses.
    pub(super) fn finish_open_call(&mut self) -> Result<(), Error> {
        self.immediate.open.take().map_or(Ok(()), |open| open.finish())
    }
}

/// Returns the lengths that memory for copies is leased for, so that calls of about the same
/// lengths share operations.
fn staged_lens(shape: &Shape, sides: &Sides) -> Lens {
    // Without room for the next power of two, there is none for the operation either.
    let rounded = |len: usize, least: usize| {
        let len = len.max(least);
        len.checked_next_power_of_two().unwrap_or(len)
    };
    match &shape.lens {
        Lens::Equal(len) if shape.collective.is_reduction() => {
            Lens::Equal(rounded(*len, REDUCTION_LEN_MIN))
        }
        Lens::Equal(len) => Lens::Equal(*len),
        Lens::ByRank(lens) if sides.has_window() => Lens::ByRank(lens.clone()),
        Lens::ByRank(lens) => {
            Lens::ByRank(lens.iter().map(|len| rounded(*len, COUNT_MIN)).collect())
        }
    }
}

/// Returns the longest lengths that the operation of a call can be started with: as long as
/// possible, so that one operation serves all calls with the same windows.
fn capacity(
    shape: &Shape,
    dtype: DType,
    staged_lens: Lens,
    placed: &Placed,
    has_launches: bool,
) -> Result<Lens, Error> {
    let Lens::Equal(len) = shape.lens else { return Ok(staged_lens) };
    let [takes, gives] = shape.blocks();
    let room = |window: &Option<Arc<Inner>>, blocks: usize| {
        let bytes = window.as_ref().map_or(u64::MAX, |window| window.bytes());
        usize::try_from(bytes).unwrap_or(usize::MAX) / (blocks * dtype.bytes())
    };

    let [input, output] = &placed.windows;
    let is_shared = input.as_ref().zip(output.as_ref()).is_some_and(|(a, b)| Arc::ptr_eq(a, b));
    let most = match is_shared {
        true => room(output, takes + gives),
        false => room(input, takes).min(room(output, gives)),
    };
    if len > most {
        return Err(invalid(format!(
            "a block has {len} elements, expected at most {most}, as many as the window has room for"
        )));
    }

    // One launch makes short starts, of which an operation for the whole window would have none.
    let short = (SHORT_BYTES / dtype.bytes()).min(most);
    let most = if has_launches && len <= short { short } else { most };
    // A reduction takes memory for the contributions to its longest start.
    let mut classes = REDUCTION_CLASSES.into_iter().map(|bytes| bytes / dtype.bytes());
    let class = classes.find(|class| has_launches && len <= *class);
    let class = class.or(len.max(REDUCTION_LEN_MIN).checked_next_power_of_two()).unwrap_or(most);
    let is_reduction = shape.collective.is_reduction();
    Ok(Lens::Equal(if is_reduction { most.min(class) } else { most }))
}

fn resize(operation: &mut UntypedOperation, key: &Key, start: &Start) -> Result<(), Error> {
    let part = match &start.lens {
        Lens::Equal(len) => Part::len(*len),
        Lens::ByRank(lens) => Part::lens(lens),
    };
    let part = part.output(start.begins[1]);
    let part = if key.is_in_place { part } else { part.input(start.begins[0]) };
    operation.resize(part).map(drop)
}

/// Returns what ranks compare of a call, besides the options of its operation.
fn compared_fields(key: &Key, start: &Start) -> Offer {
    let windows = key.windows.map(|window| window.unwrap_or_default());
    let lens = match &start.lens {
        Lens::Equal(len) => format!("{len}"),
        Lens::ByRank(lens) => format!("{lens:?}"),
    };
    let operator = key.operator.map(|operator| operator.name()).unwrap_or_default();

    Offer::default()
        .field("collective", key.collective)
        .field("dtype", key.dtype)
        .field("reduction", operator)
        .field("in place", key.is_in_place)
        .field("beside_compute", key.beside_compute)
        .field("the elements of a block", lens)
        .field("the window of the input", windows[0])
        .field("the window of the output", windows[1])
        .field("the begin of the input", start.begins[0])
        .field("the begin of the output", start.begins[1])
}

impl fmt::Debug for Immediate<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Immediate")
            .field("collective", &self.collective)
            .field("counts", &self.counts)
            .finish_non_exhaustive()
    }
}
