//! What is timed: something that gathers on a stream, eagerly or replayed from a graph.
//!
//! Calls of other libraries that may wait for peers without a deadline of their own.

use std::io::Write;
use std::rc::Rc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use super::content;
use super::device::{Gpu, Graph, Span, Stream};
use crate::error::{Failure, Result};
use crate::ranks::comm::Comm;
use crate::ranks::data::TestData;

/// Starts in one graph.
const STARTS_IN_A_GRAPH: u32 = 10;

/// Puts gathers, or what is compared with them, on streams.
pub(super) trait Implementation {
    /// Its name in texts.
    fn name(&self) -> &'static str;

    /// Puts one start on the stream, or into the graph that the stream records. Collective.
    ///
    /// # Errors
    /// If it is refused.
    fn start(&mut self) -> Result<()>;

    /// Where the result of the last start lies: the shards in rank order, tensor by tensor.
    ///
    /// # Errors
    /// If that is not known.
    fn output(&self) -> Result<Vec<Span>>;

    /// Whether its calls and its waits on the device may outlast a peer that is lost: it has no
    /// deadlines of its own.
    fn may_hang(&self) -> bool {
        false
    }

    /// Makes what is started from now on come after what the stream holds, also where it runs on
    /// other streams.
    ///
    /// # Errors
    /// That of the driver.
    fn fork(&mut self) -> Result<()> {
        Ok(())
    }

    /// Makes what the stream gets from now on come after what was started.
    ///
    /// # Errors
    /// That of the driver.
    fn join(&mut self) -> Result<()> {
        Ok(())
    }
}

/// Something that gathers, and what is to know about its memory.
pub(super) struct Candidate<'a> {
    /// Before the implementation, which must outlive it.
    graph: Option<Graph>,
    implementation: Box<dyn Implementation + 'a>,
    stream: Rc<Stream>,
    gpu: Gpu,
    /// The own shard, a piece for each tensor.
    input: Vec<Span>,
    /// Outputs that starts use in turn, found by starting.
    outputs: Vec<Vec<Span>>,
}

impl<'a> Candidate<'a> {
    /// One that reads its shard from `input` and uses `outputs` outputs in turn; `captured` if it is
    /// replayed from a graph. Starts some times. Collective.
    ///
    /// # Errors
    /// If a start or the capture is refused.
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

    /// Its name in texts.
    pub(super) fn name(&self) -> &'static str {
        self.implementation.name()
    }

    /// Does `work` with it, and ends the process if that takes longer than twice the timeout where
    /// it [may hang](Implementation::may_hang).
    ///
    /// # Errors
    /// That of `work`.
    pub(super) fn guarded<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        if !self.implementation.may_hang() {
            return work(self);
        }
        // Each wait within has the timeout for itself, and says more when it ends.
        let timeout = self.gpu.timeout().saturating_mul(2);
        with_timeout(self.implementation.name(), timeout, || work(self))
    }

    /// The number of starts that will really be made for `starts`.
    pub(super) fn whole(&self, starts: u32) -> u32 {
        match self.graph {
            None => starts,
            Some(_) => starts.next_multiple_of(STARTS_IN_A_GRAPH),
        }
    }

    /// Puts so many starts on the stream, a [whole](Self::whole) number. Collective.
    ///
    /// # Errors
    /// If one is refused.
    pub(super) fn enqueue(&mut self, starts: u32) -> Result<()> {
        match &self.graph {
            None => (0..starts).try_for_each(|_| self.implementation.start()),
            Some(graph) => (0..starts / STARTS_IN_A_GRAPH)
                .try_for_each(|_| self.gpu.launch(graph, &self.stream)),
        }
    }

    /// See [`Implementation::fork`].
    pub(super) fn fork(&mut self) -> Result<()> {
        self.implementation.fork()
    }

    /// See [`Implementation::join`].
    pub(super) fn join(&mut self) -> Result<()> {
        self.implementation.join()
    }

    /// Gathers fresh data into poisoned outputs and compares every byte on every rank. Collective.
    ///
    /// # Errors
    /// If the gather fails, or a byte is wrong on any rank.
    pub(super) fn check(&mut self, comm: &Comm, rank: usize, data: TestData) -> Result<()> {
        let ranks = comm.share("to check", &())?.len();
        content::poison(&self.gpu, &self.outputs)?;
        content::fill(&self.gpu, data, (rank, ranks), &self.input)?;
        // In place the poison covers the own shard, which is filled after it. No rank starts before
        // all have poisoned, because peers write here as soon as they do.
        comm.share("poisoned and filled", &())?;
        let mut found = Ok(());
        for index in 0..self.outputs.len() {
            let output = match self.graph {
                None => {
                    self.implementation.start()?;
                    self.implementation.output()?
                }
                Some(_) => {
                    self.enqueue(STARTS_IN_A_GRAPH)?;
                    self.outputs[index].clone()
                }
            };
            self.finish()?;
            found = found.and(content::compare(&self.gpu, data, &output)?);
        }
        content::agree(comm, self.name(), found)
    }

    fn finish(&self) -> Result<()> {
        self.gpu.finish(&self.stream, self.implementation.name())
    }

    /// Records the starts of a graph. The graph is not run here.
    fn capture(&mut self) -> Result<()> {
        let name = self.implementation.name();
        self.gpu.begin_capture(&self.stream)?;
        let started = (0..STARTS_IN_A_GRAPH).try_for_each(|_| self.implementation.start());
        // Ended also after a refusal, so that the stream can be used and destroyed.
        let graph = self.gpu.end_capture(&self.stream, name);
        started?;
        self.graph = Some(graph?);
        Ok(())
    }
}

/// Does `work`, and ends this process with an error if that takes longer than `timeout`: such a call
/// cannot be interrupted, and peers must not wait for this rank for ever.
///
/// # Errors
/// That of `work`.
pub(super) fn with_timeout<T>(
    what: &'static str,
    timeout: Duration,
    work: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let (done, waits) = channel::<()>();
    let guard = move || {
        if waits.recv_timeout(timeout) == Err(RecvTimeoutError::Timeout) {
            let failure = Failure::failed(format!("{what} took longer than {timeout:?}"))
                .with_advice("see whether all ranks run; raise --timeout if they are slow");
            // A closed standard error leaves nobody to tell.
            writeln!(std::io::stderr(), "{failure}").ok();
            std::io::stdout().flush().ok();
            end();
        }
    };
    let guard = thread::Builder::new()
        .name("guard".to_owned())
        .spawn(guard)
        .map_err(|error| Failure::io("cannot start a thread", &error))?;
    let result = work();
    drop(done);
    // It cannot panic, and ends as soon as the channel is closed.
    guard.join().ok();
    result
}

/// Ends this process, and calls nobody: exit handlers of a library would run under the feet of the
/// call that hangs in it, and NCCL's have ended in a segmentation fault there.
fn end() -> ! {
    // SAFETY: the call takes nothing and does not return; the kernel closes what is open.
    unsafe { libc::_exit(1) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ends_in_time_gives_its_result() {
        let long = Duration::from_secs(60);
        assert_eq!(with_timeout("nothing", long, || Ok(7)), Ok(7));
        let failure = Failure::failed("refused");
        assert_eq!(with_timeout("nothing", long, || Err::<(), _>(failure.clone())), Err(failure));
    }
}
