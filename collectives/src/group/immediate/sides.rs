//! Decides where the input and the output of a call are for its operation: in a window of the
//! caller, or in memory for copies.
//!
//! All ranks must decide alike, so the decision depends on the collective, the lengths, and whether
//! the caller names a window, which ranks compare. Memory in a window is used directly. Other
//! memory is copied, because its place differs between ranks.

use std::sync::Arc;

use peerlane_hal::Rank;

use super::memory::Memory;
use super::shape::{Lens, Shape, invalid};
use super::staging::{ALIGN_BYTES, Copy};
use crate::collective::Collective;
use crate::error::Error;
use crate::group::window::Inner;

/// Where the operation of a call has its input or its output.
pub(super) enum Side {
    /// In a window of the caller, from this byte on.
    Window(Arc<Inner>, u64),
    /// In memory for copies.
    Staged,
    /// The input is the block of the rank in the output.
    InPlace,
}

/// The places of the input and the output, before memory for copies is leased.
pub(super) struct Sides {
    pub(super) input: Side,
    pub(super) output: Side,
    /// The memory that is copied before the start, and the byte of the input, or in place of the
    /// output, to which it is copied.
    copied_in: Option<(Memory, u64)>,
    /// The memory to which the output is copied after the start.
    copied_out: Option<Memory>,
}

/// The places of the input and the output, and the copies.
pub(super) struct Placed {
    /// The windows of the input, unless in place, and of the output.
    pub(super) windows: [Option<Arc<Inner>>; 2],
    /// The bytes at which they begin there.
    pub(super) begins: [u64; 2],
    pub(super) copy_in: Option<Copy>,
    pub(super) copy_out: Option<Copy>,
}

impl Placed {
    /// Returns whether this rank copies to or from memory that the host cannot access.
    pub(super) fn copies_device_memory(&self) -> bool {
        let mut copies = self.copy_in.iter().chain(&self.copy_out);
        copies.any(|copy| copy.window.is_on_device())
    }
}

fn side_of(memory: Option<&Memory>) -> Side {
    match memory.and_then(|memory| memory.location.window()) {
        Some((window, begin)) => Side::Window(Arc::clone(window), begin),
        None => Side::Staged,
    }
}

impl Sides {
    /// Places the input and the output of a call. `has_launches` says whether a kernel can make the
    /// starts of the group.
    pub(super) fn new(
        shape: &Shape,
        rank: Rank,
        (input, output): (Option<Memory>, Option<Memory>),
        has_launches: bool,
    ) -> Result<Self, Error> {
        let is_provider = shape.collective.is_provider(rank);
        let is_receiver = shape.collective.is_receiver(rank);
        // The root of a broadcast can give its array as the input or as the output.
        let has_one_array = is_provider && is_broadcast(shape.collective);
        check_given(shape, rank, "input", input.as_ref(), is_provider && !has_one_array)?;
        check_given(shape, rank, "output", output.as_ref(), is_receiver && !has_one_array)?;

        let sides = match shape.collective {
            Collective::Broadcast { .. } => Self::of_broadcast(is_provider, input, output),
            Collective::AllGather => Self::of_all_gather(shape, rank, input, output),
            // Two contributions have one sum in both orders, and on a stream each copy costs the
            // host as much as a launch. Where the host copies, it costs less than one more round.
            Collective::AllReduce
                if has_launches
                    && shape.ranks <= 2
                    && is_given_twice(&input, &output)
                    && matches!(side_of(output.as_ref()), Side::Window(..)) =>
            {
                let output = side_of(output.as_ref());
                Self { input: Side::InPlace, output, copied_in: None, copied_out: None }
            }
            _ => Self::apart(is_provider, is_receiver, input, output),
        };
        sides.check_copied(shape.collective)?;
        Ok(sides)
    }

    /// Refuses to copy from a window, whose slices only the starts of operations exclude.
    ///
    /// The start excludes them if the same part is the output.
    fn check_copied(&self, collective: Collective) -> Result<(), Error> {
        let copied = self.copied_in.as_ref().and_then(|(memory, _)| memory.location.window());
        let Some((window, begin)) = copied else { return Ok(()) };

        let is_output = matches!(
            &self.output,
            Side::Window(output, of_output) if Arc::ptr_eq(output, window) && *of_output == begin
        );
        if is_output {
            return Ok(());
        }
        Err(invalid(format!(
            "input is in a window, from which this call of {} would have to copy it; give it in other memory, or as a \
             part of the output",
            collective.with_article()
        )))
    }

    fn of_broadcast(is_root: bool, input: Option<Memory>, output: Option<Memory>) -> Self {
        let side = side_of(output.as_ref().or(input.as_ref()));
        let is_staged = matches!(side, Side::Staged);

        // On the root, the array is in its place already if the caller gives one array in a window.
        let source = input.as_ref().or(output.as_ref()).filter(|_| is_root);
        let is_placed = |source: &Memory| {
            let address = source.location.address();
            matches!(&side, Side::Window(window, begin) if window.address(*begin) == address)
        };
        let copied_in = source.filter(|source| !is_placed(source)).map(|one| (one.clone(), 0));

        let source_address = copied_in.as_ref().map(|(source, _)| source.location.address());
        let copied_out =
            output.filter(|target| is_staged && source_address != Some(target.location.address()));
        Self { input: Side::InPlace, output: side, copied_in, copied_out }
    }

    fn of_all_gather(
        shape: &Shape,
        rank: Rank,
        input: Option<Memory>,
        output: Option<Memory>,
    ) -> Self {
        let output_side = side_of(output.as_ref());
        let size = input.as_ref().map_or(1, |input| input.unit * input.dtype.bytes());
        let own_begin = (shape.before(rank) * size) as u64;

        // Blocks of different lengths begin at different places, and a place of the input must be
        // equal on all ranks. So their input is the block, or is copied to it.
        let has_equal_lens = matches!(shape.lens, Lens::Equal(_));
        let input_side = side_of(input.as_ref());
        let is_own_block = match (&input, &output_side) {
            (Some(input), Side::Window(window, begin)) => {
                input.location.address() == window.address(begin + own_begin)
            }
            _ => false,
        };
        let copied_out = output.filter(|_| matches!(output_side, Side::Staged));
        if matches!(input_side, Side::Window(..)) && has_equal_lens && !is_own_block {
            return Self { input: input_side, output: output_side, copied_in: None, copied_out };
        }

        let copied_in = input.filter(|_| !is_own_block).map(|input| (input, own_begin));
        Self { input: Side::InPlace, output: output_side, copied_in, copied_out }
    }

    /// Places the input and the output apart, as in reductions, which add in rank order only so.
    fn apart(
        is_provider: bool,
        is_receiver: bool,
        input: Option<Memory>,
        output: Option<Memory>,
    ) -> Self {
        let output_side = side_of(output.as_ref());
        let is_staged = is_given_twice(&input, &output);
        let input_side = if is_staged { Side::Staged } else { side_of(input.as_ref()) };

        let input = input.filter(|_| is_provider && matches!(input_side, Side::Staged));
        let copied_out = output.filter(|_| is_receiver && matches!(output_side, Side::Staged));
        let copied_in = input.map(|input| (input, 0));
        Self { input: input_side, output: output_side, copied_in, copied_out }
    }

    pub(super) fn is_in_place(&self) -> bool {
        matches!(self.input, Side::InPlace)
    }

    /// Returns whether memory for copies is needed, on any rank.
    pub(super) fn are_staged(&self) -> bool {
        [&self.input, &self.output].into_iter().any(|side| matches!(side, Side::Staged))
    }

    /// Returns whether a side is in a window of the caller.
    pub(super) fn has_window(&self) -> bool {
        [&self.input, &self.output].into_iter().any(|side| matches!(side, Side::Window(..)))
    }

    /// Returns the bytes that the staged input and the staged output need.
    pub(super) fn staged_bytes(&self, [input, output]: [u64; 2]) -> [u64; 2] {
        let bytes = |side: &Side, bytes| if matches!(side, Side::Staged) { bytes } else { 0 };
        [bytes(&self.input, input), bytes(&self.output, output)]
    }

    /// Places what is staged in a window of `lease`, of whose bytes the input needs `input_bytes`.
    pub(super) fn place(self, lease: Option<&Arc<Inner>>, input_bytes: u64) -> Placed {
        let staged = || Arc::clone(lease.expect("memory for copies is leased if a side needs it"));
        let place = |side: Side, begin| match side {
            Side::Window(window, begin) => (Some(window), begin),
            Side::Staged => (Some(staged()), begin),
            Side::InPlace => (None, 0),
        };
        let (input, input_begin) = place(self.input, 0);
        let (output, output_begin) = place(self.output, input_bytes.next_multiple_of(ALIGN_BYTES));

        let copy = |memory: Memory, window: &Arc<Inner>, offset: u64| Copy {
            bytes: memory.bytes() as u64,
            caller: memory.location.address(),
            window: Arc::clone(window),
            offset,
        };
        let target = output.as_ref().expect("an output is in a window");
        let copy_in = self.copied_in.map(|(memory, begin)| match &input {
            Some(window) => copy(memory, window, input_begin + begin),
            None => copy(memory, target, output_begin + begin),
        });
        let copy_out = self.copied_out.map(|memory| copy(memory, target, output_begin));

        let begins = [input_begin, output_begin];
        Placed { windows: [input, output], begins, copy_in, copy_out }
    }
}

/// Returns whether the input and the output are the same memory.
fn is_given_twice(input: &Option<Memory>, output: &Option<Memory>) -> bool {
    let memory = input.as_ref().zip(output.as_ref());
    memory.is_some_and(|(input, output)| input.location.address() == output.location.address())
}

fn is_broadcast(collective: Collective) -> bool {
    matches!(collective, Collective::Broadcast { .. })
}

/// Refuses a call without memory that the collective needs.
fn check_given(
    shape: &Shape,
    rank: Rank,
    name: &str,
    given: Option<&Memory>,
    is_needed: bool,
) -> Result<(), Error> {
    if given.is_some() || !is_needed {
        return Ok(());
    }
    // A rank without elements needs no memory, which can so have no address.
    let len = if name == "input" { shape.input_len(rank) } else { shape.output_len(rank) };
    if len == 0 {
        return Ok(());
    }
    Err(invalid(format!(
        "{name} is missing, expected {len} elements: rank {rank} has an {name} in {}",
        shape.collective.with_article()
    )))
}

#[cfg(test)]
mod tests {
    use std::ptr::NonNull;

    use super::super::memory::Location;
    use super::*;
    use crate::element::DType;

    fn memory(address: &mut [u8]) -> Memory {
        let len = address.len();
        let location = Location::Address(NonNull::from(address).cast());
        Memory { location, dtype: DType::U8, unit: 1, len }
    }

    #[test]
    fn missing_memory_is_refused_where_the_collective_needs_it() {
        let mut bytes = [0; 4];
        let shape = Shape {
            collective: Collective::Gather { root: Rank(1) },
            ranks: 2,
            lens: Lens::Equal(4),
        };
        assert!(Sides::new(&shape, Rank(0), (Some(memory(&mut bytes)), None), false).is_ok());
        let refused = Sides::new(&shape, Rank(1), (Some(memory(&mut bytes)), None), false);
        let text = refused.err().unwrap().to_string();
        assert_eq!(
            text,
            "output is missing, expected 8 elements: rank 1 has an output in a gather"
        );
    }

    #[test]
    fn an_array_that_is_input_and_output_is_staged_as_input() {
        let mut bytes = [0; 4];
        let array = memory(&mut bytes);
        let shape = Shape { collective: Collective::AllReduce, ranks: 2, lens: Lens::Equal(4) };
        let sides = Sides::new(&shape, Rank(0), (Some(array.clone()), Some(array)), true).unwrap();
        assert!(matches!((&sides.input, &sides.output), (Side::Staged, Side::Staged)));
        assert!(!sides.is_in_place() && sides.are_staged());
        assert_eq!(sides.staged_bytes([4, 4]), [4, 4]);
    }
}
