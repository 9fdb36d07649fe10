//! Sets lengths and places of single starts of an operation.
//!
//! The plan of an operation does not depend on lengths, so its proof holds for all of them.
//! [`Operation::resize`] checks the lengths and places, and changes the offsets and lengths of the
//! copies and additions that are already bound; nothing is exchanged.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use peerlane_hal::{ErrorKind, Rank};

use super::counts::CountTable;
use super::prepared::Prepared;
use super::{Operation, State};
use crate::collective::Collective;
use crate::element::DType;
use crate::error::Error;
use crate::group::start_part::{PeerLens, StartPart};
use crate::group::window::Extent;
use crate::layout::{Layout, StartBytes};
use crate::plan::{Plan, Source};

/// The block lengths of the next starts of an operation, and the elements at which their input and
/// output begin.
///
/// [`Operation::resize`] sets them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part<'a> {
    lens: PartLens<'a>,
    input: Option<usize>,
    output: Option<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PartLens<'a> {
    Equal(usize),
    Each(&'a [usize]),
    SendReceive(&'a [usize], &'a [usize]),
    Table(&'a CountTable),
}

impl<'a> Part<'a> {
    /// Creates a part in which all blocks have `len` elements, or the whole input of an all-reduce.
    pub fn len(len: usize) -> Self {
        Self { lens: PartLens::Equal(len), input: None, output: None }
    }

    /// Creates a part with one block length for each rank, as in
    /// [`BlockLens`](crate::group::BlockLens). In an all-reduce, all are equal.
    pub fn lens(lens: &'a [usize]) -> Self {
        Self { lens: PartLens::Each(lens), ..Self::len(0) }
    }

    /// Creates a part of an all-to-all in which this rank sends `send[r]` elements to rank r and
    /// receives `receive[r]` elements from it.
    ///
    /// Every block stays where the lengths of the preparation put it, in the input and in the
    /// output. What a rank sends to another must be what the other receives from it; the two ranks
    /// compare it in every start, see [`Operation::resize`].
    pub fn send_receive(send: &'a [usize], receive: &'a [usize]) -> Self {
        Self { lens: PartLens::SendReceive(send, receive), ..Self::len(0) }
    }

    /// Creates a part with the blocks of a table that [`CountTable::place`] has accepted.
    pub(super) fn table(table: &'a CountTable) -> Self {
        Self { lens: PartLens::Table(table), ..Self::len(0) }
    }

    /// Sets the element of the input buffer or window at which the input begins. The default is the
    /// element at which it began when the operation was prepared.
    #[must_use]
    pub fn input(self, begin: usize) -> Self {
        Self { input: Some(begin), ..self }
    }

    /// Sets the element of the output buffer or window at which the output begins. The default is
    /// the element at which it began when the operation was prepared.
    #[must_use]
    pub fn output(self, begin: usize) -> Self {
        Self { output: Some(begin), ..self }
    }
}

impl From<usize> for Part<'_> {
    fn from(len: usize) -> Self {
        Self::len(len)
    }
}

impl<'a> From<&'a [usize]> for Part<'a> {
    fn from(lens: &'a [usize]) -> Self {
        Self::lens(lens)
    }
}

/// What an operation needs to change the lengths and places of its starts.
pub(super) struct Resizing {
    dtype: DType,
    plans: Vec<StartPlan>,
    /// The number of the plan whose executor the operation uses now.
    current: usize,
    /// Whether starts of other plans may be open.
    has_open_others: AtomicBool,
    prepared: Layout,
    /// The bytes of the input and of the output buffer or window.
    bytes: [u64; 2],
    /// The values of the last [`Operation::resize`] with equal lengths: length, and places of input
    /// and output in bytes.
    last: Option<[u64; 3]>,
}

/// A plan for starts up to a size.
pub(super) struct StartPlan {
    /// The largest [size](Layout::data_bytes) of a start, in bytes.
    bytes_max: u64,
    plan: Plan,
    /// The layout in the form of the plan, in which the next start is laid out.
    next: Layout,
    /// The executor and another layout in the form of the plan. `None` while the operation uses
    /// them.
    idle: Option<(Prepared, Layout)>,
}

impl StartPlan {
    /// Creates the plan of the longest starts, whose executor and layout the operation uses.
    pub(super) fn in_use(plan: Plan, layout: &Layout) -> Self {
        Self { bytes_max: u64::MAX, plan, next: layout.clone(), idle: None }
    }

    pub(super) fn idle(bytes_max: u64, plan: Plan, layout: Layout, prepared: Prepared) -> Self {
        let next = layout.clone();
        Self { bytes_max, plan, next, idle: Some((prepared, layout)) }
    }
}

impl Resizing {
    /// Creates the part of an operation that changes its starts.
    ///
    /// `plans` are the plans from the one for the longest starts, which `prepared` executes.
    /// `windows` are the bytes of the windows that hold the input and the output.
    pub(super) fn new(
        dtype: DType,
        plans: Vec<StartPlan>,
        (layout, rank): (&Layout, Rank),
        windows: [Option<u64>; 2],
        prepared: &Prepared,
    ) -> Box<Self> {
        set_part(&plans, prepared, (layout, rank, dtype), 0);

        let own = [layout.input_bytes_max(), layout.output_bytes_max()];
        let bytes = [0, 1].map(|index| windows[index].unwrap_or(own[index]));
        Box::new(Self {
            dtype,
            plans,
            current: 0,
            has_open_others: AtomicBool::new(false),
            prepared: layout.clone(),
            bytes,
            last: None,
        })
    }

    /// Returns the index of the plan that the next start uses.
    pub(super) fn current_plan(&self) -> usize {
        self.current
    }

    fn plan(&self) -> &Plan {
        &self.plans[self.current].plan
    }

    /// Sets how long the next starts of other plans than the current one may take.
    pub(super) fn set_timeout_of_others(&self, timeout: Duration) {
        for (prepared, _) in self.plans.iter().filter_map(|plan| plan.idle.as_ref()) {
            prepared.tracker().set_timeout(timeout);
        }
    }

    /// Waits for open starts of other plans than the current one.
    pub(super) fn settle_others(&self, timeout: Duration) -> Result<(), Error> {
        if self.has_open_others.load(Ordering::Acquire) {
            for (prepared, _) in self.plans.iter().filter_map(|plan| plan.idle.as_ref()) {
                prepared.settle(timeout)?;
            }
            // Only now, so that another thread that reads the output does not come too early.
            self.has_open_others.store(false, Ordering::Release);
        }
        Ok(())
    }

    /// Computes the layout of the next starts in the form of plan `plan`.
    fn set_lengths(&mut self, plan: usize, lens: PartLens<'_>, rank: Rank) -> Result<(), Error> {
        let ranks = self.prepared.ranks();
        let size = self.dtype.bytes() as u64;
        let check = |name: &str, lens: &[usize]| match lens.len() {
            found if found == ranks => Ok(()),
            found => Err(invalid(format!(
                "{name} has {found} lengths, expected {ranks}, one for each rank"
            ))),
        };

        // Lengths that overflow are longer than the prepared ones.
        let bytes = |len: usize| (len as u64).saturating_mul(size).min(u64::MAX / 4 / ranks as u64);
        let next = &mut self.plans[plan].next;
        match lens {
            PartLens::Equal(len) => next.set_blocks(StartBytes::Equal(bytes(len))),
            PartLens::Each(lens) => {
                check("lens", lens)?;
                if next.has_one_length() {
                    let len = common_len(lens, next.requested_collective())?;
                    return next.set_blocks(StartBytes::Equal(bytes(len)));
                }
                let of = |rank: Rank| bytes(lens[rank.index()]);
                next.set_blocks(StartBytes::ByRank(&of))
            }
            PartLens::SendReceive(send, receive) => {
                check("send", send)?;
                check("receive", receive)?;
                let of = |lens: &'_ [usize], rank: Rank| bytes(lens[rank.index()]);
                let (send, receive) = (|rank| of(send, rank), |rank| of(receive, rank));
                next.set_blocks(StartBytes::ByPair { rank, send: &send, receive: &receive })
            }
            PartLens::Table(table) => {
                let block = |provider, receiver| table.block(provider, receiver, size);
                next.set_blocks(StartBytes::Placed { rank, block: &block })
            }
        }
    }

    /// Computes the layout of the next starts. Returns the number of the plan for them, in whose
    /// `next` it is, and the offsets of input and output in bytes.
    fn lay_out(&mut self, part: &Part<'_>, rank: Rank) -> Result<(usize, [u64; 2]), Error> {
        let size = self.dtype.bytes() as u64;
        let bytes = |len: usize| (len as u64).saturating_mul(size).min(u64::MAX / 4);

        // The plan of the longest starts has room for all lengths that are allowed.
        self.set_lengths(0, part.lens, rank)?;
        let next = &self.plans[0].next;
        if let Some((what, found, most)) = next.longer_than(&self.prepared) {
            return Err(invalid(format!(
                "{what} is {} elements, expected at most the {} elements for which the operation was prepared",
                found / size,
                most / size
            )));
        }
        if self.plan().in_place && part.input.is_some() {
            return Err(invalid(
                "a place of the input is given, expected none: in place, the input is the rank's block of the output"
                    .to_owned(),
            ));
        }

        let needs = [next.input_bytes_max(), next.output_bytes_max()];
        let given = [part.input, part.output];
        let mut offsets = self.prepared.offsets(rank);
        for (index, what) in ["input", "output"].into_iter().enumerate() {
            if let Some(begin) = given[index] {
                offsets[index] = bytes(begin);
            }

            let (begin, need, all) = (offsets[index], needs[index], self.bytes[index]);
            if begin.saturating_add(need) > all {
                return Err(invalid(format!(
                    "the {what} is {} elements from element {}, expected a range within 0..{}, the elements of its \
                     buffer or window",
                    need / size,
                    given[index].map_or(begin / size, |begin| begin as u64),
                    all / size
                )));
            }
        }

        let data_bytes = next.data_bytes();
        let plan = match part.lens {
            // The last plan is that for starts which all ranks have entered.
            PartLens::Table(table) if !table.is_entered() => 0,
            _ => self.plans.iter().rposition(|plan| data_bytes <= plan.bytes_max).unwrap_or(0),
        };
        if plan != 0 {
            self.set_lengths(plan, part.lens, rank)?;
        }

        let StartPlan { plan: chosen, next, .. } = &mut self.plans[plan];
        next.set_offsets(offsets[0], offsets[1]);
        next.set_chunks(chosen.chunks);
        Ok((plan, offsets))
    }
}

/// Returns the length of the inputs of an operation in which all have the same one.
fn common_len(lens: &[usize], collective: Collective) -> Result<usize, Error> {
    let first = lens.first().copied().unwrap_or(0);
    match lens.iter().position(|&len| len != first) {
        None => Ok(first),
        Some(other) => Err(invalid(format!(
            "lens[{other}] is {} elements, and lens[0] is {first}, expected one length for all \
             ranks in {}",
            lens[other],
            collective.with_article()
        ))),
    }
}

impl<T> Operation<T> {
    /// Sets the lengths and places of the next starts, within those of the preparation as
    /// [`resizable`](super::OperationBuilder::resizable). Every rank sets the same ones before the
    /// same start.
    ///
    /// Nothing is exchanged and nothing allocated, so each start can have its own. Blocks follow
    /// each other without gaps in the input and the output, except with [`Part::send_receive`]. The
    /// methods that access the memory of the operation, such as [`input_mut`](Self::input_mut),
    /// [`output`](Self::output) and [`output_of`](Self::output_of), use these lengths and places
    /// from now on, so read the output of the last start before.
    ///
    /// If the engines of an open start still have to submit some of its steps, waits for it first.
    /// A start that was recorded into a graph keeps the lengths and places that it was recorded
    /// with.
    ///
    /// A start with other lengths or places than on another rank ends the group with an error that
    /// names both ranks and their values. If the host polls the flags, it finds this before it
    /// copies. If the engines wait for flags, the host compares when it sees that the start is
    /// complete: always if it can read the flags directly or each pair of ranks has a length, and
    /// otherwise if [`check_starts`](super::OperationBuilder::check_starts) is set. Starts on a
    /// stream are only compared if the host waits for them before the next one. Ranks compare a
    /// digest of 24 bits, or of 7 bits where a NIC signals; it changes with each start.
    ///
    /// ```
    /// # use peerlane::bootstrap::{Bootstrap, in_process};
    /// # use peerlane::{Group, Part, host};
    /// # in_process::run(2, |bootstrap| {
    /// # let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
    /// # let mut group = Group::open(bootstrap, fabric)?;
    /// let rank = group.rank().0 as i32;
    /// let mut gather = group.all_gather::<i32>(1000).resizable().prepare()?;
    /// for len in [3, 1000, 0, 1] {
    ///     gather.resize(len)?.input_mut()?.fill(rank);
    ///     gather.run()?;
    ///     assert_eq!(gather.output()?.len(), 2 * len);
    /// }
    /// assert_eq!(gather.output()?, [0, 1]);
    /// gather.resize(Part::len(2).output(10))?.input_mut()?.fill(7);
    /// gather.run()?;
    /// assert_eq!(gather.output()?, [7; 4]);
    /// # group.close()
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if the operation is not resizable, a length
    /// is above the prepared one, a range leaves its buffer or window, or input and output overlap;
    /// then the last lengths and places stay. The reason why the group has ended.
    pub fn resize<'p>(&mut self, part: impl Into<Part<'p>>) -> Result<&mut Self, Error> {
        self.state.resize(&part.into())?;
        Ok(self)
    }
}

impl State {
    pub(super) fn resize(&mut self, part: &Part<'_>) -> Result<(), Error> {
        let Some(mut resizing) = self.resizing.take() else {
            return Err(invalid(
                "the operation is not resizable; prepare it with `resizable()`".to_owned(),
            ));
        };
        let resized = self.resize_with(&mut resizing, part);
        self.resizing = Some(resizing);
        resized
    }

    fn resize_with(&mut self, resizing: &mut Resizing, part: &Part<'_>) -> Result<(), Error> {
        let (plan, offsets) = resizing.lay_out(part, self.rank)?;

        // Most programs keep the lengths and places for many starts.
        let equal = match part.lens {
            PartLens::Equal(len) => Some(len as u64),
            _ => None,
        };
        let values = equal.map(|len| [len, offsets[0], offsets[1]]);
        if values.is_some() && values == resizing.last {
            return Ok(());
        }

        let (started, is_done) = self.prepared.prepare_resize(self.timeout)?;
        self.set_extents(&resizing.plans[plan].next, offsets)?;

        if plan != resizing.current {
            *resizing.has_open_others.get_mut() |=
                !is_done || self.prepared.tracker().is_unfinished();
            let chosen = resizing.plans[plan].idle.take();
            let (prepared, layout) = chosen.expect("only the current one is used");
            let last_prepared = std::mem::replace(&mut self.prepared, prepared);
            let last_layout = std::mem::replace(&mut self.layout, layout);
            resizing.plans[resizing.current].idle = Some((last_prepared, last_layout));
            resizing.current = plan;
        }

        // Both layouts are in the form of this plan.
        std::mem::swap(&mut self.layout, &mut resizing.plans[plan].next);
        self.prepared.resize(resizing.plan(), &self.layout, started)?;
        let next = (&self.layout, self.rank, resizing.dtype);
        set_part(&resizing.plans, &self.prepared, next, started);
        resizing.last = values;
        Ok(())
    }

    /// Notes which bytes of windows the next starts use.
    fn set_extents(&self, next: &Layout, offsets: [u64; 2]) -> Result<(), Error> {
        let Some(uses) = &self.uses else { return Ok(()) };

        let bytes = [next.input_bytes(self.rank), next.output_bytes(self.rank)];
        let extent = |index: usize| {
            let window = self.windows[index].as_ref().filter(|_| self.uses_window(index))?;
            let bytes = offsets[index]..offsets[index] + bytes[index];
            Some(Extent { window: window.number, bytes, writes: index == 1 })
        };
        let extents = [extent(0), extent(1)];

        if let [Some(input), Some(output)] = &extents
            && input.conflicts(output)
        {
            return Err(invalid(format!(
                "input and output overlap: the input is bytes {} to {} of window {}, the output is bytes {} to {} of the \
                 same window",
                input.bytes.start,
                input.bytes.end,
                input.window,
                output.bytes.start,
                output.bytes.end
            )));
        }

        uses.set_extents(extents);
        Ok(())
    }

    fn uses_window(&self, index: usize) -> bool {
        index == 1 || self.from == Source::Input
    }
}

/// Sets the lengths and places of the starts after `started` for all plans, of which the operation
/// uses `current`.
fn set_part(
    plans: &[StartPlan],
    current: &Prepared,
    (layout, rank, dtype): (&Layout, Rank, DType),
    started: u64,
) {
    let element_bytes = dtype.bytes() as u64;
    let part = StartPart::new(layout, rank, element_bytes);
    let pair = |peer| PeerLens {
        send: layout.block_bytes(rank, peer) / element_bytes,
        receive: layout.block_bytes(peer, rank) / element_bytes,
    };

    let others = plans.iter().filter_map(|plan| plan.idle.as_ref());
    let others = others.map(|(prepared, _)| prepared);
    others.chain([current]).for_each(|prepared| prepared.set_part(&part, &pair, started));
}

fn invalid(text: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, text)
}
