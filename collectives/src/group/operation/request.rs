//! Describes a collective operation: its element type, block lengths, input and output memory.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use peerlane_hal::{DynRegion, ErrorKind, Priority, Rank, Reduction};

use super::lens::{self, BlockLens, Destination};
use crate::collective::Collective;
use crate::cost::{Form, Links, Transfer};
use crate::element::{DType, Operator};
use crate::error::Error;
use crate::group::runtime::Runtime;
use crate::group::window::{Extent, Inner};
use crate::layout::{BufferPosition, Columns, InputPlacement, Layout, OutputPlacement, Placement};
use crate::plan::Algorithm;
use crate::run::buffers::BufferId;
use crate::run::parts::Handles;

#[derive(Clone, PartialEq)]
pub(in crate::group) enum Target {
    Buffers,
    List(Vec<Destination>),
    Window(Arc<Inner>, usize),
}

impl Target {
    fn name(&self) -> &'static str {
        match self {
            Self::Buffers => "buffers",
            Self::List(_) => "a list of destinations",
            Self::Window(..) => "a window",
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Method {
    pub(super) algorithm: Option<Algorithm>,
    pub(super) chunks: Option<u32>,
    /// Measured links, one for each kind of engines, or one for all kinds.
    pub(super) links: Vec<Links>,
    /// The form of an all-reduce, if the caller names one.
    pub(super) form: Option<Form>,
    /// How the data of fused starts moves, if the caller says it.
    pub(super) transfer: Option<Transfer>,
    /// The kind of engines, if the caller names one.
    pub(super) engine: Option<String>,
}

#[derive(Clone, PartialEq)]
pub(super) struct OperationSpec {
    /// The name in errors, instead of that of the collective and its number.
    pub(super) name: Option<&'static str>,
    pub(super) label: Option<String>,
    pub(super) collective: Collective,
    pub(super) operator: Operator,
    pub(super) dtype: DType,
    pub(super) lens: BlockLens,
    pub(super) target: Target,
    pub(super) method: Method,
    pub(super) in_place: bool,
    pub(super) outputs: Option<u32>,
    pub(super) capturable: bool,
    pub(super) any_engine: bool,
    pub(super) priority: Priority,
    pub(super) beside_compute: bool,
    pub(super) strict: bool,
    pub(super) traced: bool,
    pub(super) resizable: bool,
    /// The handles that starts have.
    pub(super) handles: Handles,
    pub(super) columns: Option<Columns>,
    pub(super) checks_starts: bool,
    pub(super) timeout: Duration,
    pub(super) inputs: Vec<DynRegion>,
    pub(super) source: Option<(Arc<Inner>, usize)>,
    pub(super) output_buffers: Vec<DynRegion>,
}

impl OperationSpec {
    /// Returns how contributions are combined, or `None` if the operation is no reduction.
    pub(super) fn reduction(&self) -> Result<Option<Reduction>, Error> {
        if !self.collective.is_reduction() {
            return Ok(None);
        }
        let reduction = Reduction::new(self.operator, self.dtype);
        reduction
            .map(Some)
            .map_err(|error| Error::new(ErrorKind::InvalidArgument, error.to_string()))
    }
}

pub(super) struct Request {
    pub(super) places: Placement,
    pub(super) extents: Vec<Extent>,
    pub(super) fields: Vec<(String, String)>,
    inputs: u32,
    outputs: u32,
    has_inbox: bool,
    windows: BTreeMap<BufferId, Arc<Inner>>,
}

impl Request {
    pub(super) fn new(
        spec: &OperationSpec,
        layout: &Layout,
        me: Rank,
        group: &Arc<Runtime>,
    ) -> Result<Self, Error> {
        check(spec)?;
        let mut request = Self {
            places: Placement::CONTIGUOUS,
            extents: Vec::new(),
            fields: Vec::new(),
            inputs: u32::from(!spec.in_place),
            outputs: 1,
            has_inbox: spec.collective.is_reduction(),
            windows: BTreeMap::new(),
        };

        request.set_input(spec, layout, me, group)?;
        request.set_output(spec, layout, me, group)?;
        request.places.check(layout, me)?;

        match &request.extents[..] {
            [one, two] if one.conflicts(two) => Err(invalid(format!(
                "input and output overlap: the input is bytes {} to {} of window {}, the output is \
                 bytes {} to {} of the same window; run in place, or use another input",
                one.bytes.start, one.bytes.end, one.window, two.bytes.start, two.bytes.end
            ))),
            _ => Ok(request),
        }
    }

    fn set_input(
        &mut self,
        spec: &OperationSpec,
        layout: &Layout,
        me: Rank,
        group: &Arc<Runtime>,
    ) -> Result<(), Error> {
        if spec.inputs.len() > 1 {
            let (found, ranks) = (spec.inputs.len(), layout.ranks());
            // One buffer for each block is a list of inputs.
            let has_blocks = spec.collective.is_reduction() && layout.has_input_blocks();
            let blocks = (has_blocks && layout.tensors() == 1).then_some(ranks);

            self.places.input = if blocks == Some(found) {
                InputPlacement::ByBlock(buffer_beginnings(found))
            } else {
                InputPlacement::ByTensor(of_tensors("input", found, layout.tensors(), blocks)?)
            };
            self.inputs = count(found);
        }
        let Some((window, begin)) = &spec.source else { return Ok(()) };
        let range = elements(spec.dtype, *begin, layout.input_bytes(me));
        let position =
            self.add_window(spec.dtype, BufferId::INPUT, (window, range), false, group)?;
        self.places.input = InputPlacement::Contiguous(position);
        Ok(())
    }

    fn set_output(
        &mut self,
        spec: &OperationSpec,
        layout: &Layout,
        me: Rank,
        group: &Arc<Runtime>,
    ) -> Result<(), Error> {
        self.fields.push(("output".to_owned(), spec.target.name().to_owned()));
        match &spec.target {
            Target::Buffers if spec.output_buffers.len() > 1 => {
                let found = spec.output_buffers.len();
                let positions = of_tensors("output", found, layout.tensors(), None)?;
                self.places.output = OutputPlacement::ByTensor(positions);
                self.outputs = count(spec.output_buffers.len());
            }
            Target::Buffers => {}
            Target::List(destinations) => {
                let positions = lens::positions(spec.dtype, destinations, layout)?;
                let used = positions.iter().map(|position| position.buffer + 1).max().unwrap_or(1);
                let given = count(spec.output_buffers.len());
                if given > 0 && used > given {
                    let text = format!(
                        "destinations name output buffer {}, expected a number below {given}, the \
                         number of output buffers",
                        used - 1
                    );
                    return Err(invalid(text));
                }
                self.places.output = match spec.collective.is_reduction() {
                    // The only tensor is the only block of the output.
                    true => OutputPlacement::ByTensor(positions),
                    false => OutputPlacement::ByBlock(positions),
                };
                self.outputs = used.max(given);
            }
            Target::Window(window, begin) => {
                let range = elements(spec.dtype, *begin, layout.output_bytes(me));
                let position =
                    self.add_window(spec.dtype, BufferId::OUTPUT, (window, range), true, group)?;
                self.places.output = OutputPlacement::Contiguous(position);
                self.fields.push(("window".to_owned(), window.number.to_string()));
                self.fields.push(("begin in the window".to_owned(), begin.to_string()));
            }
        }

        Ok(())
    }

    fn add_window(
        &mut self,
        dtype: DType,
        buffer: BufferId,
        (window, range): (&Arc<Inner>, Range<usize>),
        writes: bool,
        group: &Arc<Runtime>,
    ) -> Result<BufferPosition, Error> {
        if !Arc::ptr_eq(&window.runtime, group) {
            return Err(invalid(
                "the window belongs to another group; open it with this group".to_owned(),
            ));
        }
        let bytes = window.bytes_of(dtype, &range)?;
        let position = BufferPosition { buffer: 0, offset: bytes.start };
        self.extents.push(Extent { window: window.number, bytes, writes });
        self.windows.insert(buffer, Arc::clone(window));
        Ok(position)
    }

    pub(super) fn buffers(&self) -> impl Iterator<Item = BufferId> + use<> {
        let inputs = (0..self.inputs).map(BufferId::Input);
        let inbox = self.has_inbox.then_some(BufferId::Inbox);
        (0..self.outputs).map(BufferId::Output).chain(inputs).chain(inbox)
    }

    /// Adds an inbox for blocks that peers put there instead of into the output.
    pub(super) fn add_inbox(&mut self) {
        self.has_inbox = true;
    }

    pub(super) fn outputs(&self) -> u32 {
        self.outputs
    }

    pub(super) fn window(&self, buffer: BufferId) -> Option<&Arc<Inner>> {
        self.windows.get(&buffer)
    }

    pub(super) fn takes_turns(&self) -> bool {
        self.places.output == Placement::CONTIGUOUS.output
            && self.window(BufferId::OUTPUT).is_none()
    }

    pub(super) fn need(&self, layout: &Layout, me: Rank, buffer: BufferId) -> u64 {
        let (needs, number) = match buffer {
            BufferId::Input(number) => (self.places.input_needs(layout, me), number),
            BufferId::Output(number) => (self.places.output_needs(layout, me), number),
            BufferId::Inbox => return layout.inbox_bytes(me),
        };
        needs.get(&number).copied().unwrap_or(0)
    }
}

fn elements(dtype: DType, begin: usize, bytes: u64) -> Range<usize> {
    let len = usize::try_from(bytes).unwrap_or(usize::MAX) / dtype.bytes();
    begin..begin.saturating_add(len)
}

fn check(spec: &OperationSpec) -> Result<(), Error> {
    let text = if spec.in_place && (!spec.inputs.is_empty() || spec.source.is_some()) {
        "an input buffer is given, expected none: in place, the input is the rank's block of \
             the output"
    } else if !spec.inputs.is_empty() && spec.source.is_some() {
        "the input is given as a buffer and as a range of a window, expected one of them"
    } else if !spec.output_buffers.is_empty() && matches!(spec.target, Target::Window(..)) {
        "the output is given as a buffer and as a range of a window, expected one of them"
    } else {
        return Ok(());
    };

    Err(invalid(text.to_owned()))
}

/// Returns the positions of the tensors if each has a buffer of its own.
///
/// `blocks` is the number of the blocks of the input if each can have a buffer of its own.
fn of_tensors(
    what: &str,
    found: usize,
    tensors: usize,
    blocks: Option<usize>,
) -> Result<Vec<BufferPosition>, Error> {
    if found == tensors {
        return Ok(buffer_beginnings(tensors));
    }

    let each = match blocks.filter(|&blocks| blocks > 1) {
        _ if tensors > 1 => format!(", or {tensors}, one for each tensor"),
        Some(blocks) => format!(", or {blocks}, one for each rank"),
        None => String::new(),
    };
    Err(invalid(format!("{found} {what} buffers are given, expected 1{each}")))
}

/// Returns the beginnings of the first buffers.
fn buffer_beginnings(buffers: usize) -> Vec<BufferPosition> {
    (0..count(buffers)).map(|buffer| BufferPosition { buffer, offset: 0 }).collect()
}

fn count(buffers: usize) -> u32 {
    Rank::at(buffers).0
}

fn invalid(text: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, text)
}
