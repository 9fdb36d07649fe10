//! What is timed: something that gathers on a stream, eagerly or replayed from a graph.

use std::rc::Rc;

use super::bounded::bounded;
use super::content;
use super::device::{Gpu, Graph, Span, Stream};
use crate::error::Result;
use crate::ranks::circle::Circle;
use crate::ranks::data::{Data, Numbering};

/// Starts in one graph.
const STARTS_IN_A_GRAPH: u32 = 10;

/// Puts gathers, or what is compared with them, on streams.
pub(super) trait Gatherer {
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
pub(super) struct Entrant<'a> {
    /// Before the gatherer, which must outlive it.
    graph: Option<Graph>,
    gatherer: Box<dyn Gatherer + 'a>,
    stream: Rc<Stream>,
    gpu: Gpu,
    /// The own shard, a piece for each tensor.
    input: Vec<Span>,
    /// Outputs that starts use in turn, found by starting.
    outputs: Vec<Vec<Span>>,
}

impl<'a> Entrant<'a> {
    /// One that reads its shard from `input` and uses `outputs` outputs in turn; `captured` if it is
    /// replayed from a graph. Starts some times. Collective.
    ///
    /// # Errors
    /// If a start or the capture is refused.
    pub(super) fn open(
        gatherer: Box<dyn Gatherer + 'a>,
        gpu: &Gpu,
        stream: &Rc<Stream>,
        (input, count): (Vec<Span>, u32),
        captured: bool,
    ) -> Result<Self> {
        let (gpu, stream) = (gpu.clone(), Rc::clone(stream));
        let mut entrant = Self { graph: None, gatherer, stream, gpu, input, outputs: Vec::new() };
        entrant.fork()?;
        for _ in 0..count {
            entrant.gatherer.start()?;
            entrant.outputs.push(entrant.gatherer.output()?);
        }
        entrant.join()?;
        entrant.finish()?;
        if captured {
            entrant.capture()?;
        }
        Ok(entrant)
    }

    /// Its name in texts.
    pub(super) fn name(&self) -> &'static str {
        self.gatherer.name()
    }

    /// Does `work` with it, and ends the process if that takes longer than twice the timeout where
    /// it [may hang](Gatherer::may_hang).
    ///
    /// # Errors
    /// That of `work`.
    pub(super) fn guarded<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        if !self.gatherer.may_hang() {
            return work(self);
        }
        // Each wait within has the timeout for itself, and says more when it ends.
        let timeout = self.gpu.timeout().saturating_mul(2);
        bounded(self.gatherer.name(), timeout, || work(self))
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
            None => (0..starts).try_for_each(|_| self.gatherer.start()),
            Some(graph) => (0..starts / STARTS_IN_A_GRAPH)
                .try_for_each(|_| self.gpu.launch(graph, &self.stream)),
        }
    }

    /// See [`Gatherer::fork`].
    pub(super) fn fork(&mut self) -> Result<()> {
        self.gatherer.fork()
    }

    /// See [`Gatherer::join`].
    pub(super) fn join(&mut self) -> Result<()> {
        self.gatherer.join()
    }

    /// Gathers fresh data into poisoned outputs and compares every byte on every rank. Collective.
    ///
    /// # Errors
    /// If the gather fails, or a byte is wrong on any rank.
    pub(super) fn check(
        &mut self,
        circle: &Circle,
        numbering: Numbering,
        data: Data,
    ) -> Result<()> {
        circle.share("to check", &())?;
        content::poison(&self.gpu, &self.outputs)?;
        content::fill(&self.gpu, data, numbering, &self.input)?;
        // In place the poison covers the own shard, which is filled after it. No rank starts before
        // all have poisoned, because peers write here as soon as they do.
        circle.share("poisoned and filled", &())?;
        let mut found = Ok(());
        for index in 0..self.outputs.len() {
            let output = match self.graph {
                None => {
                    self.gatherer.start()?;
                    self.gatherer.output()?
                }
                Some(_) => {
                    self.enqueue(STARTS_IN_A_GRAPH)?;
                    self.outputs[index].clone()
                }
            };
            self.finish()?;
            found = found.and(content::compare(&self.gpu, data, numbering, &output)?);
        }
        content::agree(circle, self.name(), found)
    }

    fn finish(&self) -> Result<()> {
        self.gpu.finish(&self.stream, self.gatherer.name())
    }

    /// Records the starts of a graph. The graph is not run here.
    fn capture(&mut self) -> Result<()> {
        let name = self.gatherer.name();
        self.gpu.begin_capture(&self.stream)?;
        let started = (0..STARTS_IN_A_GRAPH).try_for_each(|_| self.gatherer.start());
        // Ended also after a refusal, so that the stream can be used and destroyed.
        let graph = self.gpu.end_capture(&self.stream, name);
        started?;
        self.graph = Some(graph?);
        Ok(())
    }
}
