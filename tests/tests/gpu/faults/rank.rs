//! Opens a fabric and gathers, and prints the result.

use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use peerlane_collectives::error::Error;
use peerlane_collectives::group::{MemoryRange, Report};
use peerlane_hal::{Deadline, Error as _, Fabric as _, Rank};
use peerlane_tests::processes::Parent;
use peerlane_tests::{Gpu as _, GpuDriver, Outcome};

use crate::support::data::{block, gathered, same, unexpected};
use crate::support::test_rank::{CaptureMode, TIMEOUT, TestRank};
use crate::vendor::memory::Pinned;
use crate::vendor::stream::CallerStream;
use crate::vendor::{Context, Fabric, on_streams, options};

pub(crate) const BLOCK_BYTES: usize = 5001;
const STARTS: usize = 3;
/// How long after its start is on the stream the device of a rank breaks: the host then waits for the start, or is about to.
const BREAKS_AFTER: Duration = Duration::from_millis(20);

/// How an error looks to the parent.
pub(crate) fn fallen(step: &str, error: &Error) -> String {
    let peer = error.peer().map_or_else(|| "none".to_owned(), |peer| peer.to_string());
    format!("fell in {step}: {}, rank {peer}: {error}", error.kind())
}

/// Opens a fabric, and as many engines as the parent wants, and says what came of it.
pub(crate) fn open(parent: &Parent) -> Outcome {
    GpuDriver::load::<Context>();
    let device = parent.value("DEVICE")?;
    let engines: usize = parent.value("ENGINES").unwrap_or(0);
    // Whoever has the device keeps it until the parent has seen enough.
    let opened = Fabric::open_with(Rank(0), 1, options(device)).and_then(|mut fabric| {
        let address = fabric.address();
        fabric.connect(Rank(0), &address, Deadline::after(TIMEOUT))?;
        let engines = (0..engines)
            .map(|_| fabric.engine(Default::default()))
            .collect::<Result<Vec<_>, _>>()?;
        Ok((engines, fabric))
    });
    match &opened {
        Ok((_, fabric)) => {
            parent.print_line(format_args!("opened device {}", fabric.device().ordinal))
        }
        Err(error) => parent.print_line(format_args!("{}: {error}", error.kind())),
    }
    parent.read_line().map(drop)
}

/// A rank that gathers on a stream and from the host. Before its starts it lets a call of the driver
/// fail, or loses its device, if the parent wants that.
pub(crate) fn gather(parent: &Parent) -> Outcome {
    let mut test_rank = match TestRank::open(parent) {
        Ok(test_rank) => test_rank,
        Err(failure) => {
            parent.print_line(format_args!("closed: {failure}"));
            return Ok(());
        }
    };
    match rounds(parent, &mut test_rank)? {
        Ok(report) => parent.print_line(format_args!("gathered: {report}")),
        Err((step, error)) => {
            parent.print_line(fallen(step, &error));
            // Later calls say the same, and nothing is worth waiting for.
            if let Err(later) = test_rank.group.barrier() {
                parent.print_line(fallen("barrier", &later));
            } else {
                parent.print_line("the barrier was passed");
            }
            drop(test_rank);
            parent.print_line("alive");
            return Ok(());
        }
    }
    match test_rank.group.close() {
        Ok(()) => parent.print_line("closed well"),
        Err(error) => parent.print_line(fallen("close", &error)),
    }
    Ok(())
}

type Fallen = (&'static str, Error);

fn rounds(parent: &Parent, test_rank: &mut TestRank) -> Outcome<Result<Report, Fallen>> {
    let builder = test_rank.group.all_gather::<u8>(BLOCK_BYTES).outputs(1);
    let mut gather = match on_streams(builder).prepare() {
        Ok(gather) => gather,
        Err(error) => return Ok(Err(("prepare", error))),
    };
    let total = BLOCK_BYTES * test_rank.ranks;
    let (send, receive) = (test_rank.gpu.pinned(BLOCK_BYTES)?, test_rank.gpu.pinned(total)?);
    let mut breaker = inject(parent, test_rank)?;
    for start in 0..2 * STARTS {
        let round = test_rank.next_round();
        send.write(0, &block(test_rank.me, round, BLOCK_BYTES));
        let stream = &test_rank.stream;
        let put = copy_in(stream, &gather.input_memory().map_err(unexpected)?, &send);
        let started = if start % 2 == 0 {
            put?;
            gather.start_on(&stream.for_starts()).and_then(|mut lease| {
                breaker.iter().for_each(Breaker::begin);
                lease.wait()
            })
        } else {
            put?;
            stream.finish()?;
            gather.run()
        };
        // The parent hears that the device is broken before it hears of anything else.
        if let Some(breaker) = breaker.take() {
            breaker.finish();
        }
        if let Err(error) = started {
            return Ok(Err(("start", error)));
        }
        stream.copy_out(&receive, 0, gather.output_memory().base.as_ptr() as u64, total)?;
        stream.finish()?;
        let wanted = gathered(test_rank.ranks, round, BLOCK_BYTES);
        same(format_args!("start {}", start + 1), &receive.read(0, total), &wanted)?;
    }
    Ok(Ok(gather.report().clone()))
}

/// A rank whose capture is refused, and which then gathers without one.
pub(crate) fn capture(parent: &Parent) -> Outcome {
    let mut test_rank = TestRank::open(parent)?;
    // SAFETY: the stream is finished before the operation is dropped, and the host borrows nothing.
    let builder = unsafe { test_rank.group.all_gather::<u8>(BLOCK_BYTES).capturable() };
    let mut gather = on_streams(builder).prepare().map_err(unexpected)?;
    let stream = &test_rank.stream;
    let memory = test_rank.gpu.memory(8)?;
    inject(parent, &test_rank)?;
    let graph = stream.record(CaptureMode::Global, || {
        match gather.start_on(&stream.for_starts()) {
            Ok(lease) => parent.print_line(format_args!("{lease:?}")),
            Err(error) => parent.print_line(format_args!("{}: {error}", error.kind())),
        }
        stream.fill(memory.address, 1, 8)
    })?;
    graph.replay()?;
    stream.finish()?;
    (0..STARTS).try_for_each(|_| test_rank.gather_once(&mut gather))?;
    drop(gather);
    test_rank.group.close().map_err(unexpected)?;
    parent.print_line("the capture is whole, gathered");
    Ok(())
}

fn copy_in(stream: &CallerStream, input: &MemoryRange, send: &Pinned) -> Outcome {
    stream.copy_in(input.base.as_ptr() as u64, send, 0, BLOCK_BYTES)
}

/// Breaks the device of this rank while the rank waits for the others, and tells the parent.
struct Breaker {
    started: Sender<()>,
    thread: JoinHandle<()>,
}

impl Breaker {
    fn new(destroy: impl FnOnce() + Send + 'static) -> Self {
        let (started, begun) = channel();
        let thread = std::thread::spawn(move || {
            // An error means that there was no start.
            if begun.recv().is_ok() {
                std::thread::sleep(BREAKS_AFTER);
                destroy();
                Parent::find().expect("this process is a rank").print_line("broken");
            }
        });
        Self { started, thread }
    }

    /// Lets the device break, since a start is on its stream.
    fn begin(&self) {
        self.started.send(()).expect("the thread waits for it");
    }

    /// Waits until the device is broken, if a start has begun.
    fn finish(self) {
        drop(self.started);
        self.thread.join().expect("the thread does not panic");
    }
}

/// Makes what the parent wants to go wrong on this rank.
fn inject(parent: &Parent, test_rank: &TestRank) -> Outcome<Option<Breaker>> {
    let wanted: String = parent.value("INJECT").unwrap_or_default();
    let fields: Vec<&str> = wanted.split(':').collect();
    let simulated = Context::simulate;
    let number = |text: &str| text.parse::<i32>().expect("the parent gave a number");
    match fields[..] {
        ["fail", call, after, code] => {
            simulated().fail(call, number(after) as u32, number(code));
        }
        ["break", code] => {
            let (device, code) = (test_rank.gpu.ordinal, number(code));
            return Ok(Some(Breaker::new(move || simulated().break_device(device, code))));
        }
        ["destroy"] => {
            let device = test_rank.gpu.ordinal;
            return Ok(Some(Breaker::new(move || simulated().destroy_context(device))));
        }
        ["late"] => drop(parent.read_line()?),
        _ => {}
    }
    Ok(None)
}
