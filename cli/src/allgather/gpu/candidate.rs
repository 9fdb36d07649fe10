//! Checks an operation on a stream, and enqueues it eagerly or as replays of a graph.

use std::io::Write as _;
use std::rc::Rc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use peerlane::bootstrap::Bootstrap;
use peerlane_toolkit::limits;

use super::content;
use super::device::{Gpu, Graph, Span, Stream};
use crate::allgather::measure::{Checked, Measurement};
use crate::error::{Failure, Result};
use crate::ranks::data::TestData;
use crate::report::print_error;

/// The number of runs of the operation that one captured graph contains.
const STARTS_IN_A_GRAPH: u32 = 10;

/// Enqueues runs of a prepared operation, or of bare copies, on GPU streams.
pub(super) trait Implementation {
    fn name(&self) -> &'static str;

    /// Enqueues one run of the operation on the stream, or records the run into the graph that the
    /// stream captures. Collective.
    fn start(&mut self) -> Result<()>;

    /// Returns the error of an earlier graph replay, if there is one.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Returns the address ranges of the last output in rank order, tensor by tensor.
    fn output(&self) -> Result<Vec<Span>>;

    /// Returns whether calls of the library have no deadline, so that they may hang if a peer is
    /// lost.
    fn may_hang(&self) -> bool {
        false
    }

    /// Orders later runs of the operation behind the present work of the stream, even if they
    /// use other streams.
    fn fork(&mut self) -> Result<()> {
        Ok(())
    }

    /// Orders later work of the stream behind all enqueued runs of the operation.
    fn join(&mut self) -> Result<()> {
        Ok(())
    }
}

/// An operation that is checked and timed, with its stream and the addresses of its buffers.
pub(super) struct Candidate<'a> {
    /// The captured graph, declared first so that it is destroyed before the operation.
    graph: Option<Graph>,
    implementation: Box<dyn Implementation + 'a>,
    stream: Rc<Stream>,
    gpu: Gpu,
    /// The address ranges of this rank's input, one per tensor or one per receiving rank.
    input: Vec<Span>,
    outputs: Vec<Vec<Span>>,
}

impl<'a> Candidate<'a> {
    /// Runs the operation once for each of the `outputs` buffers to learn their addresses, and
    /// captures a graph if `captured`.
    pub(super) fn open(
        implementation: Box<dyn Implementation + 'a>,
        gpu: &Gpu,
        stream: &Rc<Stream>,
        (input, count): (Vec<Span>, u32),
        captured: bool,
    ) -> Result<Self> {
        let (gpu, stream) = (gpu.clone(), Rc::clone(stream));
        let mut candidate =
            Self { graph: None, implementation, stream, gpu, input, outputs: Vec::new() };
        candidate.fork()?;
        for _ in 0..count {
            candidate.implementation.start()?;
            candidate.outputs.push(candidate.implementation.output()?);
        }
        candidate.join()?;
        candidate.finish()?;
        if captured {
            candidate.capture()?;
        }
        Ok(candidate)
    }

    /// Runs `work`, and ends the process after twice the timeout if the library [may
    /// hang](Implementation::may_hang).
    pub(super) fn guarded<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        if !self.implementation.may_hang() {
            return work(self);
        }
        // Each wait inside `work` has the timeout, and a better error text.
        let timeout = self.gpu.timeout.saturating_mul(2);
        with_timeout(self.implementation.name(), timeout, || work(self))
    }

    /// Rounds a number of runs up to a multiple of the runs in one graph.
    pub(super) fn rounded_up(&self, starts: u32) -> u32 {
        match self.graph {
            None => starts,
            Some(_) => starts.next_multiple_of(STARTS_IN_A_GRAPH),
        }
    }

    /// Enqueues runs of the operation on the stream; their number was [rounded
    /// up](Self::rounded_up) before. Collective.
    pub(super) fn enqueue(&mut self, starts: u32) -> Result<()> {
        match &self.graph {
            None => (0..starts).try_for_each(|_| self.implementation.start()),
            Some(graph) => (0..starts / STARTS_IN_A_GRAPH).try_for_each(|_| {
                self.implementation.check()?;
                self.gpu.launch(graph, &self.stream)
            }),
        }
    }

    pub(super) fn fork(&mut self) -> Result<()> {
        self.implementation.fork()
    }

    pub(super) fn join(&mut self) -> Result<()> {
        self.implementation.join()
    }

    fn finish(&self) -> Result<()> {
        self.gpu.finish(&self.stream, self.implementation.name())
    }

    fn capture(&mut self) -> Result<()> {
        let name = self.implementation.name();
        self.gpu.begin_capture(&self.stream)?;
        let outputs = self.record();

        // The capture must end also after an error, so that the stream stays usable.
        let graph = self.gpu.end_capture(&self.stream, name);
        self.outputs = outputs?;
        self.graph = Some(graph?);
        Ok(())
    }

    /// Records the runs of one graph, and returns the outputs that they use.
    fn record(&mut self) -> Result<Vec<Vec<Span>>> {
        let mut outputs = Vec::new();
        for _ in 0..STARTS_IN_A_GRAPH {
            self.implementation.start()?;
            let output = self.implementation.output()?;
            if !outputs.contains(&output) {
                outputs.push(output);
            }
        }
        Ok(outputs)
    }
}

impl Checked for Candidate<'_> {
    fn name(&self) -> &'static str {
        self.implementation.name()
    }

    fn check(&mut self, run: &Measurement<'_>, data: TestData) -> Result<Option<String>> {
        let numbering = run.setup.numbering(run.comm.rank());
        self.guarded(|candidate| {
            run.comm.share("to check", &())?;
            content::overwrite(&candidate.gpu, &candidate.outputs)?;
            content::fill(&candidate.gpu, data, numbering, &candidate.input)?;
            // In place, the overwritten output contains the block of this rank, so the block is
            // filled afterwards. The exchange keeps ranks from starting before all outputs are
            // overwritten, because peers write into them.
            run.comm.share("overwritten and filled", &())?;
            let mut found = Ok(());
            for index in 0..candidate.outputs.len() {
                let output = match candidate.graph {
                    None => {
                        candidate.implementation.start()?;
                        candidate.implementation.output()?
                    }
                    Some(_) => {
                        candidate.enqueue(STARTS_IN_A_GRAPH)?;
                        candidate.outputs[index].clone()
                    }
                };
                candidate.finish()?;
                found = found.and(content::compare(&candidate.gpu, data, numbering, &output)?);
            }
            Ok(found.err().map(|wrong| wrong.to_string()))
        })
    }
}

/// Runs `work`, and ends this process with an error if `work` takes longer than `timeout`. Such a
/// call cannot be interrupted, and peers must not wait for this rank without limit.
pub(super) fn with_timeout<T>(
    what: &'static str,
    timeout: Duration,
    work: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let (done, waits) = channel::<()>();
    let guard = move || {
        if waits.recv_timeout(timeout) == Err(RecvTimeoutError::Timeout) {
            let failure = Failure::timeout(format!("{what} did not complete within {timeout:?}"));
            print_error(failure);
            std::io::stdout().flush().ok();
            end();
        }
    };
    let guard = limits::spawn("guard", guard).map_err(|error| Failure::of_system(&error))?;
    let result = work();
    drop(done);
    // The thread cannot panic, and ends as soon as the channel is closed.
    guard.join().ok();
    result
}

/// Ends this process without exit handlers, because these would run while a call hangs in the same
/// library; NCCL's handlers caused a segmentation fault in this situation.
fn end() -> ! {
    // SAFETY: the call has no preconditions and does not return.
    unsafe { libc::_exit(1) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_within_the_timeout_returns_its_result() {
        let long = Duration::from_secs(60);
        assert_eq!(with_timeout("nothing", long, || Ok(7)), Ok(7));
        let failure = Failure::failed("refused");
        assert_eq!(with_timeout("nothing", long, || Err::<(), _>(failure.clone())), Err(failure));
    }
}
