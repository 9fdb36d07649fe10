//! Plans offsets in one allocation, in which buffers that are not live at the same time share memory.
//!
//! This is interval colouring, also called dynamic storage allocation, which is NP-hard. The planner places the buffers one after
//! another into gaps between the buffers that are live with them, in several orders. A local search then improves the best result.
//! It uses integers and a fixed seed only, and its effort is limited by a count and not by a time. So all ranks compute the same
//! plan from the same call sites.

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::fmt;

use peerlane_hal::ErrorKind;
use serde::{Deserialize, Serialize};

use crate::element::Element;
use crate::error::{Error, quoted};
use crate::units;

/// Describes a buffer that one place of a program uses, such as the output of the gather of one layer.
///
/// A program counts its steps in the order in which it runs them, which is the same on every rank. The buffer is live from
/// step `first_use` to step `last_use`, both included. A buffer that is filled ahead of its use is live from the step in which the
/// fill starts.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CallSite {
    /// The name of the call site, different from all others.
    pub name: String,
    /// The length of the buffer in bytes.
    pub bytes: u64,
    /// The first step that uses the buffer.
    pub first_use: u64,
    /// The last step that uses the buffer.
    pub last_use: u64,
}

/// Assigns each call site an offset in one allocation, so that buffers that are live at the same step do not overlap.
///
/// [`plan_buffers`] makes it. `Display` prints a table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct BufferPlan {
    /// The buffers with their offsets, in the order of the call sites.
    pub buffers: Vec<PlannedBuffer>,
    /// The length of the allocation in bytes.
    pub peak_bytes: u64,
    /// The sum of all rounded lengths, which is what one allocation for each call site needs.
    pub separate_bytes: u64,
    /// The largest sum of rounded lengths that are live at one step. No plan has a lower peak.
    pub lower_bound_bytes: u64,
}

/// Holds a call site with its offset in the allocation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PlannedBuffer {
    /// The call site as the caller described it.
    #[serde(flatten)]
    pub call_site: CallSite,
    /// The offset of the buffer in bytes.
    pub offset_bytes: u64,
}

impl PlannedBuffer {
    /// Returns the offset of the buffer in elements of a type, as
    /// [`output_into`](crate::group::OperationBuilder::output_into) takes it.
    pub fn begin<T: Element>(&self) -> usize {
        // `ALIGNMENT` is a multiple of the size of every element type.
        usize::try_from(self.offset_bytes).unwrap_or(usize::MAX) / T::DTYPE.bytes()
    }
}

impl BufferPlan {
    /// Returns the peak divided by the lower bound, which is at least 1. A plan with a ratio of 1 cannot be improved.
    pub fn ratio(&self) -> f64 {
        match self.lower_bound_bytes {
            0 => 1.0,
            bound => self.peak_bytes as f64 / bound as f64,
        }
    }
}

/// Plans the offsets of buffers so that the length of their allocation is as short as the planner can make it.
///
/// A buffer of at least 4096 bytes begins at a multiple of 4096 and its length is rounded up to one. For shorter buffers it is a
/// multiple of 128. The same call sites give the same plan on every machine. The time to plan grows with the square of the number
/// of call sites, of which there can be 65,536.
///
/// ```
/// use peerlane::buffer_plan::{CallSite, plan_buffers};
///
/// let call_site = |name: &str, first_use, last_use| CallSite {
///     name: name.to_owned(),
///     bytes: 1 << 20,
///     first_use,
///     last_use,
/// };
/// let plan = plan_buffers(&[
///     call_site("layer 0", 0, 1),
///     call_site("layer 1", 1, 2),
///     call_site("layer 2", 2, 3),
/// ])?;
/// assert_eq!(plan.buffers[0].offset_bytes, plan.buffers[2].offset_bytes);
/// assert_eq!((plan.peak_bytes, plan.separate_bytes), (2 << 20, 3 << 20));
/// # Ok::<(), peerlane_collectives::error::Error>(())
/// ```
///
/// # Errors
/// [`InvalidArgument`](ErrorKind::InvalidArgument): there are more than 65,536 call sites, or, naming the call site, its last use is
/// before its first use, its name is that of another call site, or the sum of all lengths exceeds the address space.
pub fn plan_buffers(call_sites: &[CallSite]) -> Result<BufferPlan, Error> {
    let (blocks, separate_bytes) = blocks(call_sites)?;
    let lower_bound_bytes = live_bytes_max(&blocks);
    let placement = Search::new(&blocks, lower_bound_bytes).run();
    let buffer = |(call_site, offset_bytes): (&CallSite, u64)| PlannedBuffer {
        call_site: call_site.clone(),
        offset_bytes,
    };
    let buffers = call_sites.iter().zip(placement.offsets).map(buffer).collect();
    Ok(BufferPlan { buffers, peak_bytes: placement.peak, separate_bytes, lower_bound_bytes })
}

impl fmt::Display for BufferPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> =
            self.buffers.iter().map(|buffer| on_one_line(&buffer.call_site.name)).collect();
        let widths = names.iter().map(|name| name.chars().count());
        let width = widths.chain(["call site".len()]).max().unwrap_or_default().min(NAME_WIDTH_MAX);
        let header = ["offset", "bytes", "first use", "last use"];
        let [offset, bytes, first, last] = header;
        writeln!(f, "{:width$}  {offset:>14}  {bytes:>14}  {first:>9}  {last:>9}", "call site")?;
        for (name, PlannedBuffer { call_site, offset_bytes }) in names.iter().zip(&self.buffers) {
            let CallSite { name: _, bytes, first_use, last_use } = call_site;
            writeln!(
                f,
                "{name:width$}  {offset_bytes:>14}  {bytes:>14}  {first_use:>9}  {last_use:>9}"
            )?;
        }
        let size = |bytes| format!("{bytes:>14} bytes ({})", units::bytes(bytes));
        writeln!(f)?;
        writeln!(f, "peak                       {}", size(self.peak_bytes))?;
        writeln!(f, "one buffer per call site   {}", size(self.separate_bytes))?;
        writeln!(f, "lower bound                {}", size(self.lower_bound_bytes))?;
        writeln!(f, "peak / lower bound         {:>14.3}", self.ratio())
    }
}

/// Returns a name in one line of a table. A name with control characters is quoted, and they are escaped.
fn on_one_line(name: &str) -> Cow<'_, str> {
    if name.contains(char::is_control) { format!("{name:?}").into() } else { name.into() }
}

/// The largest width of the column of names. A longer name is printed in full, and moves the rest of its line.
const NAME_WIDTH_MAX: usize = 64;
/// The maximum number of call sites, which are planned in seconds.
const CALL_SITES_MAX: usize = 1 << 16;
/// The alignment of buffers shorter than `PAGE`, at least the size of a cache line on every device.
const ALIGNMENT: u64 = 128;
const PAGE: u64 = 4096;
/// The largest sum of all lengths. Offsets cannot overflow below it.
const TOTAL_MAX: u64 = i64::MAX as u64;
/// The number of comparisons between two blocks after which the search tries no further order.
const COMPARISONS_MAX: u64 = 200_000_000;
/// The number of changed orders that the local search tries.
const ROUNDS: usize = 400;

/// A buffer with rounded length.
#[derive(Clone, Copy, Debug)]
struct Block {
    bytes: u64,
    alignment: u64,
    first_use: u64,
    last_use: u64,
}

impl Block {
    fn steps(&self) -> u128 {
        u128::from(self.last_use - self.first_use) + 1
    }
}

/// Returns the blocks and the sum of their lengths.
fn blocks(call_sites: &[CallSite]) -> Result<(Vec<Block>, u64), Error> {
    if call_sites.len() > CALL_SITES_MAX {
        return Err(invalid(format!(
            "number of call sites is {}, expected at most {CALL_SITES_MAX}, because the time to plan grows with its square",
            call_sites.len()
        )));
    }
    let mut indices = HashMap::with_capacity(call_sites.len());
    let (mut blocks, mut total) = (Vec::with_capacity(call_sites.len()), 0_u64);
    for (index, call_site) in call_sites.iter().enumerate() {
        let CallSite { name, bytes, first_use, last_use } = call_site;
        if let Some(other) = indices.insert(name.as_str(), index) {
            return Err(invalid(format!(
                "call sites {other} and {index} have the same name {}, expected a different name for each call site",
                quoted(name)
            )));
        }
        if last_use < first_use {
            return Err(invalid(format!(
                "call site {}: last_use is {last_use}, expected at least {first_use}, its first_use",
                quoted(name)
            )));
        }
        let alignment = if *bytes >= PAGE { PAGE } else { ALIGNMENT };
        let rounded = bytes.checked_next_multiple_of(alignment);
        let sum = rounded.and_then(|rounded| total.checked_add(rounded));
        let (Some(rounded), Some(sum)) = (rounded, sum.filter(|sum| *sum <= TOTAL_MAX)) else {
            return Err(invalid(format!(
                "call site {}: bytes is {bytes}, and the call sites before it have {total} bytes, expected at most \
                 {TOTAL_MAX} bytes together",
                quoted(name)
            )));
        };
        total = sum;
        let (first_use, last_use) = (*first_use, *last_use);
        blocks.push(Block { bytes: rounded, alignment, first_use, last_use });
    }
    Ok((blocks, total))
}

fn invalid(text: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, text)
}

fn live_bytes_max(blocks: &[Block]) -> u64 {
    // At equal steps beginnings sort before ends, because `last_use` is included.
    let events = |block: &Block| {
        [(block.first_use, false, block.bytes), (block.last_use, true, block.bytes)]
    };
    let mut events: Vec<_> = blocks.iter().flat_map(events).collect();
    events.sort_unstable();
    let (mut live, mut most) = (0, 0);
    for (_, is_end, bytes) in events {
        if is_end {
            live -= bytes;
        } else {
            live += bytes;
            most = most.max(live);
        }
    }
    most
}

/// The gap that a block is placed in, among those that are long enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fit {
    Lowest,
    Shortest,
}

/// The block with the largest key is placed first.
type Key = fn(&Block) -> (u128, u128);

const KEYS: [Key; 5] = [
    |block| (block.bytes.into(), block.steps()),
    |block| (u128::from(block.bytes) * block.steps(), block.bytes.into()),
    |block| (block.steps(), block.bytes.into()),
    |block| ((u64::MAX - block.first_use).into(), block.bytes.into()),
    |block| (block.last_use.into(), block.bytes.into()),
];

#[derive(Clone, Copy, Debug)]
struct Placed {
    begin: u64,
    end: u64,
    first_use: u64,
    last_use: u64,
}

#[derive(Debug)]
struct Placement {
    order: Vec<usize>,
    fit: Fit,
    offsets: Vec<u64>,
    peak: u64,
}

struct Search<'b> {
    blocks: &'b [Block],
    lower_bound: u64,
    comparisons: u64,
    random: Random,
}

impl<'b> Search<'b> {
    fn new(blocks: &'b [Block], lower_bound: u64) -> Self {
        Self { blocks, lower_bound, comparisons: 0, random: Random(0x9E37_79B9_7F4A_7C15) }
    }

    fn run(mut self) -> Placement {
        let mut best: Option<Placement> = None;
        for key in KEYS {
            let mut order: Vec<usize> = (0..self.blocks.len()).collect();
            // A buffer without bytes stays at offset 0.
            order.retain(|&index| self.blocks[index].bytes > 0);
            order.sort_by_key(|&index| Reverse(key(&self.blocks[index])));
            for fit in [Fit::Lowest, Fit::Shortest] {
                let peak_max = match &best {
                    Some(best) if self.is_done(best) => break,
                    Some(best) => best.peak - 1,
                    None => u64::MAX,
                };
                best = self.place(order.clone(), fit, peak_max).or(best);
            }
        }
        self.improve(best.expect("a placement without a limit succeeds"))
    }

    fn is_done(&self, best: &Placement) -> bool {
        best.peak == self.lower_bound || self.comparisons >= COMPARISONS_MAX
    }

    /// Places a topmost block earlier and moves up to three random blocks too. Keeps an order that is not worse.
    fn improve(&mut self, mut best: Placement) -> Placement {
        for round in 0..ROUNDS {
            if self.is_done(&best) {
                break;
            }
            let is_top = |&position: &usize| {
                let index = best.order[position];
                best.offsets[index] + self.blocks[index].bytes == best.peak
            };
            let tops: Vec<usize> = (0..best.order.len()).filter(is_top).collect();
            let from = tops[self.random.below(tops.len())];
            let mut order = best.order.clone();
            let index = order.remove(from);
            order.insert(self.random.below(from + 1), index);
            for _ in 0..round % 4 {
                let index = order.remove(self.random.below(order.len()));
                order.insert(self.random.below(order.len() + 1), index);
            }
            let fit = if round % 8 < 4 { Fit::Lowest } else { best.fit };
            if let Some(placement) = self.place(order, fit, best.peak) {
                best = placement;
            }
        }
        best
    }

    /// Places the blocks in an order. Returns `None` if the peak would exceed a limit.
    fn place(&mut self, order: Vec<usize>, fit: Fit, peak_max: u64) -> Option<Placement> {
        let mut placed: Vec<Placed> = Vec::with_capacity(order.len());
        let (mut offsets, mut peak) = (vec![0; self.blocks.len()], 0);
        for &index in &order {
            let block = &self.blocks[index];
            self.comparisons += placed.len() as u64;
            let begin = offset(&placed, block, fit);
            let end = begin + block.bytes;
            if end > peak_max {
                return None;
            }
            peak = peak.max(end);
            offsets[index] = begin;
            let Block { first_use, last_use, .. } = *block;
            let position = placed.partition_point(|other| other.begin < begin);
            placed.insert(position, Placed { begin, end, first_use, last_use });
        }
        Some(Placement { order, fit, offsets, peak })
    }
}

/// Returns the offset of a block among blocks that are sorted by their begin.
fn offset(placed: &[Placed], block: &Block, fit: Fit) -> u64 {
    let (mut free, mut shortest) = (0_u64, None);
    for other in placed {
        if other.first_use > block.last_use || other.last_use < block.first_use {
            continue;
        }
        if other.begin > free {
            let begin = free.next_multiple_of(block.alignment);
            let gap = other.begin - free;
            if begin + block.bytes <= other.begin {
                if fit == Fit::Lowest {
                    return begin;
                }
                if shortest.is_none_or(|(least, _)| gap < least) {
                    shortest = Some((gap, begin));
                }
            }
        }
        free = free.max(other.end);
    }
    shortest.map_or_else(|| free.next_multiple_of(block.alignment), |(_, begin)| begin)
}

/// An xorshift generator.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        // The remainder is below `bound`, which is a `usize`.
        (self.0 % bound as u64) as usize
    }
}
