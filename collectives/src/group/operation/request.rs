//! Where an operation reads and writes on this rank: its buffers, by number, and ranges of windows.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use peerlane_hal::{ErrorKind, Rank};

use super::shards::{self, Destination};
use crate::element::DType;
use crate::error::Error;
use crate::group::shared::Shared;
use crate::group::window::{Extent, Inner};
use crate::layout::{BufferPosition, InputPlacement, Layout, OutputPlacement, Placement};
use crate::run::buffers::BufferId;

/// A range of a window, in elements.
#[derive(Clone)]
pub(in crate::group) struct Part {
    pub(in crate::group) window: Arc<Inner>,
    pub(in crate::group) range: Range<usize>,
}

/// Where an operation gathers.
pub(in crate::group) enum Target {
    /// In one buffer, or in one for each tensor.
    Buffers,
    /// Each shard in a place of its own.
    List(Vec<Destination>),
    /// In a range of a window.
    Window(Part),
}

/// What the caller says of the places of this rank.
pub(super) struct Asked<'a> {
    pub(super) target: &'a Target,
    /// Where the own shard begins in a window.
    pub(super) source: Option<&'a (Arc<Inner>, usize)>,
    pub(super) in_place: bool,
    /// How many input and output buffers it gives.
    pub(super) inputs: usize,
    pub(super) outputs: usize,
}

/// What that comes to.
pub(super) struct Request {
    pub(super) places: Placement,
    /// Of windows.
    pub(super) extents: Vec<Extent>,
    /// What must be equal on all ranks.
    pub(super) fields: Vec<(String, String)>,
    inputs: u32,
    outputs: u32,
    windows: BTreeMap<BufferId, Arc<Inner>>,
}

impl Request {
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument), naming what does not fit.
    pub(super) fn new(
        dtype: DType,
        asked: &Asked<'_>,
        layout: &Layout,
        me: Rank,
        group: &Arc<Shared>,
    ) -> Result<Self, Error> {
        asked.check()?;
        let mut request = Self {
            places: Placement::CONTIGUOUS,
            extents: Vec::new(),
            fields: Vec::new(),
            inputs: u32::from(!asked.in_place),
            outputs: 1,
            windows: BTreeMap::new(),
        };
        request.set_input(dtype, asked, layout, me, group)?;
        request.set_output(dtype, asked, layout, group)?;
        request.places.check(layout, me)?;
        match &request.extents[..] {
            [one, two] if one.conflicts(two) => Err(invalid(format!(
                "the input is bytes {} to {} of window {}, and the output bytes {} to {} of it; \
                 gather in place, or from elsewhere",
                one.bytes.start, one.bytes.end, one.window, two.bytes.start, two.bytes.end
            ))),
            _ => Ok(request),
        }
    }

    fn set_input(
        &mut self,
        dtype: DType,
        asked: &Asked<'_>,
        layout: &Layout,
        me: Rank,
        group: &Arc<Shared>,
    ) -> Result<(), Error> {
        if asked.inputs > 1 {
            let spots = of_tensors("input", asked.inputs, layout.tensors())?;
            self.places.input = InputPlacement::ByTensor(spots);
            self.inputs = count(asked.inputs);
        }
        let Some((window, begin)) = asked.source else { return Ok(()) };
        let bytes = layout.input_bytes(me);
        let len = usize::try_from(bytes).unwrap_or(usize::MAX) / dtype.bytes();
        let part = Part { window: Arc::clone(window), range: *begin..begin.saturating_add(len) };
        let spot = self.enter(dtype, BufferId::INPUT, &part, false, group)?;
        self.places.input = InputPlacement::Contiguous(spot);
        Ok(())
    }

    fn set_output(
        &mut self,
        dtype: DType,
        asked: &Asked<'_>,
        layout: &Layout,
        group: &Arc<Shared>,
    ) -> Result<(), Error> {
        match asked.target {
            Target::Buffers if asked.outputs > 1 => {
                let spots = of_tensors("output", asked.outputs, layout.tensors())?;
                self.places.output = OutputPlacement::ByTensor(spots);
                self.outputs = count(asked.outputs);
            }
            Target::Buffers => {}
            Target::List(destinations) => {
                let spots = shards::spots(dtype, destinations, layout.ranks())?;
                let used = spots.iter().map(|spot| spot.buffer + 1).max().unwrap_or(1);
                let given = count(asked.outputs);
                if given > 0 && used > given {
                    let text = format!(
                        "destinations name output buffer {}, expected less than {given}, the number \
                         of output buffers",
                        used - 1
                    );
                    return Err(invalid(text));
                }
                self.places.output = OutputPlacement::ByShard(spots);
                self.outputs = used.max(given);
            }
            Target::Window(part) => {
                let spot = self.enter(dtype, BufferId::OUTPUT, part, true, group)?;
                let len = usize::try_from(layout.total_bytes()).unwrap_or(usize::MAX);
                debug_assert_eq!(len, part.range.len() * dtype.bytes());
                self.places.output = OutputPlacement::Contiguous(spot);
                self.fields.push(("window".to_owned(), part.window.number.to_string()));
                self.fields.push(("begin of the range".to_owned(), part.range.start.to_string()));
            }
        }
        Ok(())
    }

    /// Takes a range of a window as a buffer; where it begins.
    fn enter(
        &mut self,
        dtype: DType,
        buffer: BufferId,
        part: &Part,
        writes: bool,
        group: &Arc<Shared>,
    ) -> Result<BufferPosition, Error> {
        let Part { window, range } = part;
        if !Arc::ptr_eq(&window.shared, group) {
            return Err(invalid("the window is of another group".to_owned()));
        }
        let bytes = window.bytes_of(dtype, range)?;
        let spot = BufferPosition { buffer: 0, offset: bytes.start };
        self.extents.push(Extent { window: window.number, bytes, writes });
        self.windows.insert(buffer, Arc::clone(window));
        Ok(spot)
    }

    /// The buffers that hold bytes.
    pub(super) fn buffers(&self) -> impl Iterator<Item = BufferId> + use<> {
        let inputs = (0..self.inputs).map(BufferId::Input);
        (0..self.outputs).map(BufferId::Output).chain(inputs)
    }

    /// How many output buffers there are.
    pub(super) fn outputs(&self) -> u32 {
        self.outputs
    }

    /// The window that a buffer is.
    pub(super) fn window(&self, buffer: BufferId) -> Option<&Arc<Inner>> {
        self.windows.get(&buffer)
    }

    /// Whether there may be several outputs in turn: in one buffer of the operation's own.
    pub(super) fn takes_turns(&self) -> bool {
        self.places.output == Placement::CONTIGUOUS.output
            && self.window(BufferId::OUTPUT).is_none()
    }

    /// How long a buffer must be.
    pub(super) fn need(&self, layout: &Layout, me: Rank, buffer: BufferId) -> u64 {
        let (needs, number) = match buffer {
            BufferId::Input(number) => (self.places.input_needs(layout, me), number),
            BufferId::Output(number) => (self.places.output_needs(layout), number),
            BufferId::Flags | BufferId::CrossTierFlags => return 0,
        };
        needs.get(&number).copied().unwrap_or(0)
    }
}

impl Asked<'_> {
    fn check(&self) -> Result<(), Error> {
        let text = if self.in_place && (self.inputs > 0 || self.source.is_some()) {
            "in place there is no input buffer; the shard lies in the output"
        } else if self.inputs > 0 && self.source.is_some() {
            "the input is a buffer and a range of a window, expected one of them"
        } else if self.outputs > 0 && matches!(self.target, Target::Window(_)) {
            "the output is a range of a window, expected no output buffer"
        } else {
            return Ok(());
        };
        Err(invalid(text.to_owned()))
    }
}

/// A buffer for each tensor.
fn of_tensors(what: &str, seen: usize, tensors: usize) -> Result<Vec<BufferPosition>, Error> {
    if seen == tensors {
        return Ok((0..count(tensors))
            .map(|buffer| BufferPosition { buffer, offset: 0 })
            .collect());
    }
    let each =
        if tensors > 1 { format!(", or one for each of {tensors} tensors") } else { String::new() };
    Err(invalid(format!("there are {seen} {what} buffers, expected 1{each}")))
}

fn count(buffers: usize) -> u32 {
    Rank::at(buffers).0
}

fn invalid(text: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, text)
}
