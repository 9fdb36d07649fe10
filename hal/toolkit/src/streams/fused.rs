//! Runs starts of an operation as launches of a kernel, on the streams of the engine.
//!
//! A start is one launch and the event of its ticket. Nothing is written to flags in a release:
//! blocks that wait look at a word in host memory, and leave when it is set. So a launch that waits
//! never needs a second context, as queued waits do.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use peerlane_hal::{
    At, Flag, FusedLimits, FusedOps, FusedProgress, FusedStarts, Launch, Op, Operator,
    ProgressReader, Reduction, Ticket,
};

use super::resources::{OwnStream, PinnedWords};
use super::{Engine, Forked, StreamDevice};
use crate::device::{DevicePtr, FusedKernel, StreamHandle, backend_id};
use crate::fused::{Addresses, Control, Flat, Program, ReservedBlocks, compile, slot_bytes};
use crate::regions::{Local, Remote};
use crate::{EngineRegion, EngineState, Fault, RegionBounds, check_elements};

/// The largest time that the device takes to fill the slots of an operation with zeros.
const CLEAR_TIMEOUT: Duration = Duration::from_secs(10);
/// A launch and the event of its ticket.
const COMMANDS: usize = 2;
/// The most bits of a digest. Flags can then count 2³⁹ starts.
const DIGEST_BITS_MAX: u32 = 24;

/// The fused starts of an engine.
#[derive(Debug)]
pub(super) struct Fused {
    blocks: ReservedBlocks,
    limits: FusedLimits,
    programs: Vec<Compiled>,
    /// The words by which the host and the launches of all programs know of each other.
    host: FusedWords,
    /// The start that was found running, and when.
    running: Option<(u64, Instant)>,
}

#[derive(Clone, Copy, Debug)]
struct Compiled {
    program: Program,
    kernel: FusedKernel,
}

impl Fused {
    /// Loads the kernel and reserves the blocks of an engine, if it is to make fused starts.
    ///
    /// # Errors
    /// Returns an error of kind `Unavailable` if the driver refuses the kernel, or there is no room
    /// for the blocks on the device.
    pub(super) fn reserve<D: StreamDevice>(
        context: &D,
        blocks: Option<u32>,
        host: FusedWords,
    ) -> Result<Option<Self>, D::Error> {
        let Some(blocks) = blocks else { return Ok(None) };
        let Some(limits) = context.fused_limits() else {
            return Err(Fault::Unavailable("the device has no fused starts".to_owned()).into());
        };
        if !(1..=limits.blocks_max).contains(&blocks) {
            return Err(Fault::Argument(format!(
                "a fused start has {blocks} blocks of threads, expected 1 to {}",
                limits.blocks_max
            ))
            .into());
        }

        // A driver that refuses the code does so here, where the caller can use another kind.
        context.prepare_fused(None)?;
        let device = (backend_id::<D>(), context.uuid());
        let blocks = ReservedBlocks::reserve(device, blocks, context.resident_blocks_max())?;
        Ok(Some(Self { blocks, limits, programs: Vec::new(), host, running: None }))
    }

    /// Lets all blocks that wait leave, and those of later launches.
    pub(super) fn abort(&self) {
        self.host.abort();
    }

    pub(super) fn is_running(&self) -> bool {
        let FusedProgress { begun, done } = self.host.progress();
        begun > done
    }

    /// Returns for how long the start that runs has been running, counted from the first call that
    /// finds it running.
    pub(super) fn running_time(&mut self) -> Option<Duration> {
        let FusedProgress { begun, done } = self.host.progress();
        if begun == done {
            self.running = None;
            return None;
        }

        let (_, since) = match self.running {
            Some(known) if known.0 == begun => known,
            _ => *self.running.insert((begun, Instant::now())),
        };
        Some(since.elapsed())
    }
}

// SAFETY: the program was checked against the ops, whose places are inside their regions.
unsafe impl<D: StreamDevice> FusedStarts for Engine<D> {
    type Error = D::Error;
    type Local = Local<D>;
    type Remote = Remote<D>;

    fn compile(&mut self, ops: &FusedOps<'_, Local<D>, Remote<D>>) -> Result<Launch, D::Error> {
        self.state.check()?;
        let Some(Fused { blocks, limits, host, .. }) = &self.hardware.fused else {
            return Err(Fault::Argument("the engine has no fused starts".to_owned()).into());
        };
        let (host, begun) = (*host, host.progress().begun);
        if begun > 0 || ops.blocks != blocks.blocks() {
            return Err(Fault::Argument(format!(
                "the ops of fused starts have {} blocks, and {begun} starts were made, expected \
                 the {} blocks that the engine has reserved, and no start",
                ops.blocks,
                blocks.blocks()
            ))
            .into());
        }
        let launch = Launch { blocks: ops.blocks, threads: limits.threads };

        let slots = slots(ops)?;
        let counter = counter(&ops.counter, &self.state)?;
        let compiled = self.compiled(ops, slots.as_ref(), None)?;
        let program = Program { control: counter.start, host: host.address(), ..compiled.program };

        let _relaxed = self.context.enter_relaxed()?;
        let main = &self.hardware.main;
        let cleared = [Some(&counter), slots.as_ref()].into_iter().flatten();
        cleared.into_iter().try_for_each(|range| clear(&*self.context, main, range))?;
        // Peers put into the slots as soon as all ranks have compiled.
        main.finish(&*self.context, CLEAR_TIMEOUT, "filling the slots of an operation with zeros")?;

        if let Some(fused) = &mut self.hardware.fused {
            fused.programs.push(Compiled { program, ..compiled });
        }
        Ok(launch)
    }

    fn replace(
        &mut self,
        program: usize,
        ops: &FusedOps<'_, Local<D>, Remote<D>>,
    ) -> Result<(), D::Error> {
        self.state.check()?;
        let fused = self.hardware.fused.as_ref();
        let known = fused.and_then(|fused| fused.programs.get(program));
        let Some(&Compiled { program: before, kernel }) = known else {
            return Err(no_program(program, fused).into());
        };
        let counter = counter(&ops.counter, &self.state)?;
        let has_slots = before.ops().iter().any(|op| op.slots != 0) || ops.slots.is_some();
        let is_alike = counter.start == before.control
            && (ops.base, ops.digest_bits) == (before.base, before.shift)
            && fused.is_some_and(|fused| fused.blocks.blocks() == ops.blocks);
        if has_slots || !is_alike {
            let text = "other slots, blocks, values or another counter in a program that replaces \
                        another one, expected no slots and the same values";
            return Err(Fault::Argument(text.to_owned()).into());
        }

        let compiled = self.compiled(ops, None, Some(kernel))?;
        let Program { control, host, .. } = before;
        if let Some(fused) = &mut self.hardware.fused {
            let program = &mut fused.programs[program];
            *program = compiled;
            (program.program.control, program.program.host) = (control, host);
        }
        Ok(())
    }

    unsafe fn start(&mut self, program: usize, digest: u64) -> Result<Ticket, D::Error> {
        self.state.check()?;
        if self.state.is_released() {
            return Err(Fault::Released.into());
        }
        // After an error nothing is enqueued, so the engine stays usable.
        let fused = self.hardware.fused.as_mut();
        let Some(known) = fused.and_then(|fused| fused.programs.get_mut(program)) else {
            return Err(no_program(program, self.hardware.fused.as_ref()).into());
        };
        if digest >> known.program.shift != 0 {
            return Err(Fault::Argument(format!(
                "the digest of a start is {digest:#x}, expected at most {} bits",
                known.program.shift
            ))
            .into());
        }
        // The driver copies the program when a launch is enqueued or recorded.
        known.program.digest = digest as u32;

        if let Some(Forked { stream, captured: Some(_) }) = &self.forked {
            let stream = stream.raw();
            self.hardware.captures.note_use();
            let _entered = self.context.enter()?;
            self.launch(program, stream)?;
            return Ok(Ticket(self.pending.last()));
        }

        if self.pending.admit(COMMANDS).is_err() {
            let settled = self.settle();
            self.state.keep(settled)?;
            self.pending.admit(COMMANDS)?;
        }
        (self.just_submitted, self.submits) = (true, self.submits + 1);
        self.parker.busy();
        let launched = self.launch_eager(program);
        self.state.keep(launched)
    }

    fn progress(&mut self) -> Result<ProgressReader, D::Error> {
        let Some(Fused { host, .. }) = &self.hardware.fused else {
            return Err(Fault::Argument("the engine has no fused starts".to_owned()).into());
        };
        let host = *host;
        Ok(Arc::new(move || host.progress()))
    }
}

/// The words of a program in memory of the host, as `crate::fused::HostWords`.
#[derive(Clone, Copy, Debug)]
pub(super) struct FusedWords(PinnedWords);

impl FusedWords {
    pub(super) const WORDS: usize = 3;
    const ABORT: usize = 0;
    const BEGUN: usize = 1;
    const DONE: usize = 2;

    /// Takes over words that are zero.
    pub(super) fn new(words: PinnedWords) -> Self {
        Self(words)
    }

    fn address(self) -> DevicePtr {
        self.0.address(Self::ABORT)
    }

    fn abort(self) {
        self.0.store(Self::ABORT, 1);
    }

    fn progress(self) -> FusedProgress {
        // Read in this order, so that a start that ends meanwhile counts as running.
        let done = self.0.load(Self::DONE);
        FusedProgress { begun: self.0.load(Self::BEGUN).max(done), done }
    }
}

impl<D: StreamDevice> Engine<D> {
    /// Compiles ops, without the addresses of the words of the program. A program that does not
    /// reduce runs by the kernel `before`, if there is one.
    fn compiled(
        &self,
        ops: &FusedOps<'_, Local<D>, Remote<D>>,
        slots: Option<&Range<DevicePtr>>,
        before: Option<FusedKernel>,
    ) -> Result<Compiled, D::Error> {
        if ops.digest_bits > DIGEST_BITS_MAX {
            return Err(Fault::Argument(format!(
                "the digests of starts have {} bits, expected at most {DIGEST_BITS_MAX}",
                ops.digest_bits
            ))
            .into());
        }

        let flat = self.flat(ops)?;
        let program = compile(&flat.steps, slots)?;
        let kernel = match before.filter(|_| flat.reduction.is_none()) {
            Some(before) => before,
            None => {
                let _relaxed = self.context.enter_relaxed()?;
                self.context.prepare_fused(flat.reduction)?
            }
        };

        let divisor = if kernel.divides { flat.sources } else { 1 };
        let (base, flip, shift) = (ops.base, kernel.flip, ops.digest_bits);
        Ok(Compiled { program: Program { base, divisor, flip, shift, ..program }, kernel })
    }

    fn launch_eager(&mut self, program: usize) -> Result<Ticket, D::Error> {
        let context = Arc::clone(&self.context);
        let _entered = context.enter()?;
        let hardware = &mut *self.hardware;
        let main = self.forked.as_ref().map_or(hardware.main.raw(), |forked| forked.stream.raw());
        let last = self.pending.last();
        // Starts share memory, so one on another stream waits for the one before.
        if self.last_main != main && self.pending.done() < last {
            hardware.tickets.order(&context, main)?;
        }

        self.launch(program, main)?;
        self.hardware.tickets.record(&context, last + 1, main)?;
        self.last_main = main;
        Ok(Ticket(self.pending.issue(COMMANDS)))
    }

    /// Enqueues a launch of a program; the context is current.
    fn launch(&self, program: usize, stream: StreamHandle) -> Result<(), D::Error> {
        let Some(Fused { programs, blocks, .. }) = &self.hardware.fused else { return Ok(()) };
        let (Compiled { program, kernel }, blocks) = (&programs[program], blocks.blocks());
        // SAFETY: `compile` has loaded the kernel for this program. The caller of `start` keeps the
        // memory and makes no two starts at the same time; the stream is alive.
        unsafe { self.context.launch_fused(stream, *kernel, program, blocks) }
    }

    /// Checks the ops of even and odd starts, and returns them as steps with two addresses.
    fn flat(&self, ops: &FusedOps<'_, Local<D>, Remote<D>>) -> Result<FlatOps, D::Error> {
        let [even, odd] = ops.ops;
        for of_start in [even, odd] {
            self.state.check_slice(of_start)?;
            // A flag is one word for each block, of which the first one has just been checked.
            let last: Vec<_> = of_start.iter().filter_map(|op| last_word(op, ops.blocks)).collect();
            self.state.check_slice(&last)?;
        }
        if even.len() != odd.len() {
            return Err(differ(even.len(), odd.len()).into());
        }

        let mut flat = FlatOps { steps: Vec::new(), reduction: None, sources: 1 };
        for (number, (even, odd)) in even.iter().zip(odd).enumerate() {
            let step = match (*even, *odd) {
                (
                    Op::Put { dst, src, bytes },
                    Op::Put { dst: odd_dst, src: odd_src, bytes: odd_bytes },
                ) if bytes == odd_bytes => {
                    let to_peer = !self.resolver.is_own(dst.region)?;
                    if to_peer && ops.slots.is_some() {
                        [dst, odd_dst].into_iter().try_for_each(|slot| check_slot(slot, bytes))?;
                    }
                    let (to, from) = (place([dst, odd_dst])?, place([src, odd_src])?);
                    Flat::Copy { to, from, bytes, to_peer }
                }
                (
                    Op::Reduce { dst, srcs, bytes, reduction },
                    Op::Reduce {
                        dst: odd_dst,
                        srcs: odd_srcs,
                        bytes: odd_bytes,
                        reduction: odd_reduction,
                    },
                ) if bytes == odd_bytes
                    && srcs.len() == odd_srcs.len()
                    && reduction == odd_reduction =>
                {
                    let places = [dst, odd_dst].into_iter().chain(srcs.iter().copied());
                    let places = places.chain(odd_srcs.iter().copied());
                    let addresses = places.map(|at| at.region.address_at(at.offset));
                    check_elements(addresses.chain([bytes]), reduction)?;

                    flat.set_reduction(reduction, srcs.len() as u32)?;
                    let from = srcs.iter().zip(odd_srcs).map(|(even, odd)| place([*even, *odd]));
                    Flat::Reduce {
                        to: place([dst, odd_dst])?,
                        from: from.collect::<Result<_, _>>()?,
                        bytes,
                    }
                }
                (Op::Signal { flag, value }, Op::Signal { flag: odd, value: odd_value }) => {
                    let flag = Addresses([flag, odd].map(|it| it.region.flag_address(it.word)));
                    match starts_before((ops.base, ops.digest_bits), [value, odd_value]) {
                        Some(0) => Flat::Signal(flag),
                        _ => return Err(wrong_values(ops.base, [value, odd_value]).into()),
                    }
                }
                (Op::Wait { flag, value, .. }, Op::Wait { flag: odd, value: odd_value, .. }) => {
                    let flag = Addresses([flag, odd].map(|it| it.region.flag_address(it.word)));
                    match starts_before((ops.base, ops.digest_bits), [value, odd_value]) {
                        Some(0) => Flat::Wait(flag),
                        Some(1) => Flat::WaitLast(flag),
                        _ => return Err(wrong_values(ops.base, [value, odd_value]).into()),
                    }
                }
                (
                    Op::Get { .. } | Op::PutRows { .. } | Op::GetRows { .. },
                    Op::Get { .. } | Op::PutRows { .. } | Op::GetRows { .. },
                ) if even.name() == odd.name() => {
                    let text = format!("no launch runs a {}, expected other ops", even.name());
                    return Err(Fault::Unavailable(text).into());
                }
                _ => return Err(differ(number, number).into()),
            };
            flat.steps.push(step);
        }
        flat.steps.retain(|step| {
            !matches!(step, Flat::Copy { bytes: 0, .. } | Flat::Reduce { bytes: 0, .. })
        });
        Ok(flat)
    }
}

/// The ops of a start with addresses.
struct FlatOps {
    steps: Vec<Flat>,
    reduction: Option<Reduction>,
    /// The number of contributions that are added, by which an average divides.
    sources: u32,
}

impl FlatOps {
    /// Sets the reduction of the program, which has one kernel and one divisor.
    fn set_reduction(&mut self, reduction: Reduction, sources: u32) -> Result<(), Fault> {
        let is_other = self.reduction.is_some_and(|known| known != reduction);
        let divides_by_other = self.reduction.is_some() && self.sources != sources;
        if is_other || divides_by_other && reduction.operator() == Operator::Average {
            let text = "the start has reductions of several kinds, expected one for a launch";
            return Err(Fault::Unavailable(text.to_owned()));
        }
        (self.reduction, self.sources) = (Some(reduction), sources);
        Ok(())
    }
}

/// Checks that a peer has room for a slot, which is longer than its data.
fn check_slot<M: EngineRegion + RegionBounds>(slot: At<'_, M>, bytes: u64) -> Result<(), Fault> {
    let At { region, offset } = slot;
    let end = offset.checked_add(slot_bytes(bytes)).filter(|end| *end <= region.bytes());
    if end.is_none() || !region.address_at(offset).is_multiple_of(slot_bytes(1)) {
        return Err(Fault::Argument(format!(
            "a slot for {bytes} bytes is at offset {offset} of a region of {} bytes, expected {} \
             bytes inside of it that begin at a multiple of {}",
            region.bytes(),
            slot_bytes(bytes),
            slot_bytes(1)
        )));
    }
    Ok(())
}

#[cold]
fn no_program(program: usize, fused: Option<&Fused>) -> Fault {
    let programs = fused.map_or(0, |fused| fused.programs.len());
    Fault::Argument(format!(
        "the number of the program is {program}, expected one below {programs}, the number of \
         programs that were compiled"
    ))
}

#[cold]
fn differ(even: usize, odd: usize) -> Fault {
    Fault::Argument(format!(
        "the ops of even starts (from op {even} on) differ from those of odd starts (from op {odd} on), \
         expected the same ops with other places"
    ))
}

/// Returns how many starts before its own one an op of a flag concerns, by its values in even and
/// in odd starts, or `None` if no start has such values.
fn starts_before((base, digest_bits): (u64, u32), [even, odd]: [u64; 2]) -> Option<u64> {
    let step = 1 << digest_bits;
    let first = base.checked_add(step)?;
    match even.checked_sub(first)? {
        0 if odd == 0 => Some(1),
        after if after == step && odd == first => Some(0),
        _ => None,
    }
}

#[cold]
fn wrong_values(base: u64, [even, odd]: [u64; 2]) -> Fault {
    Fault::Argument(format!(
        "a flag has the values {odd} and {even} in odd and in even starts, expected those of the \
         first two starts after {base}, or in a wait those of the starts before them"
    ))
}

/// Returns the op of a flag for the last of its words, which the last block uses.
fn last_word<'a, L, R>(op: &Op<'a, L, R>, blocks: u32) -> Option<Op<'a, L, R>> {
    let more = u64::from(blocks.saturating_sub(1));
    match *op {
        Op::Signal { flag, value } => {
            let flag = Flag { word: flag.word.saturating_add(more), ..flag };
            Some(Op::Signal { flag, value })
        }
        Op::Wait { flag, value, reset } => {
            let flag = Flag { word: flag.word.saturating_add(more), ..flag };
            Some(Op::Wait { flag, value, reset })
        }
        _ => None,
    }
}

/// Returns the addresses of a place in even and in odd starts.
fn place<M: EngineRegion>(both: [At<'_, M>; 2]) -> Result<Addresses, Fault> {
    if both.iter().any(|at| at.region.is_on_host()) {
        let text = "data is in memory of the host, expected memory of devices for a launch";
        return Err(Fault::Unavailable(text.to_owned()));
    }
    Ok(Addresses(both.map(|at| at.region.address_at(at.offset))))
}

/// Returns the addresses of the slots of this rank.
fn slots<D: StreamDevice>(
    ops: &FusedOps<'_, Local<D>, Remote<D>>,
) -> Result<Option<Range<DevicePtr>>, Fault> {
    let Some((At { region, offset }, bytes)) = ops.slots else { return Ok(None) };
    let has_room = offset.checked_add(bytes).is_some_and(|end| end <= region.bytes());
    let is_aligned = |base: &DevicePtr| base.is_multiple_of(slot_bytes(1));
    let base = has_room.then(|| region.address_at(offset)).filter(is_aligned);
    let Some(base) = base else {
        return Err(Fault::Argument(format!(
            "the slots are {bytes} bytes from offset {offset} on in a region of {} bytes, expected \
             a range inside of it that begins at a multiple of {}",
            region.bytes(),
            slot_bytes(1)
        )));
    };
    Ok(Some(base..base + bytes))
}

/// Returns the addresses of the words in which the device counts the starts.
fn counter<D: StreamDevice>(
    flag: &Flag<'_, Local<D>>,
    state: &EngineState<D::Error>,
) -> Result<Range<DevicePtr>, D::Error> {
    let words: [Op<'_, Local<D>, Remote<D>>; 2] = [0, 1].map(|more| {
        let word = flag.word.saturating_add(more);
        Op::Wait { flag: Flag { word, ..*flag }, value: 0, reset: false }
    });
    state.check_slice(&words)?;

    let address = flag.region.flag_address(flag.word);
    Ok(address..address + size_of::<Control>() as u64)
}

fn clear<D: StreamDevice>(
    context: &D,
    stream: &OwnStream<D>,
    range: &Range<DevicePtr>,
) -> Result<(), D::Error> {
    let bytes = (range.end - range.start) as usize;
    // SAFETY: the range is inside a region that the caller keeps, and nobody uses it yet.
    unsafe { context.set(stream.raw(), range.start, 0, bytes) }
}
