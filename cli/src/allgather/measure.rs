//! One size: its limit, checks before and after, and the timed iterations between.

use std::time::Duration;

use peerlane::bootstrap::Bootstrap;
use peerlane::hal::Fabric;
use peerlane::{AllGather, Element, Group};

use super::clock::{Pace, Timing};
use super::content::{self, Found};
use super::event::{Activity, Event, Sink};
use super::figures::{self, Figures};
use super::limit::{Copies, Limit};
use super::setup::{Setup, Way};
use super::timeline;
use crate::error::{Failure, Result};
use crate::ranks::circle::Circle;
use crate::ranks::data::Data;
use crate::ranks::statistics::longest_of_each;
use crate::report::Row;

/// Everything that a rank measures with.
pub(crate) struct Bench<'a, F: Fabric> {
    pub(crate) setup: Setup<'a>,
    pub(crate) seed: u64,
    pub(crate) pace: Pace,
    pub(crate) circle: Circle,
    pub(crate) group: Group<F>,
    pub(crate) limit: Option<Limit<F>>,
    pub(crate) sink: Sink<'a>,
}

impl<F: Fabric> Bench<'_, F> {
    /// Tells the one who prints, if this rank is the one that tells.
    ///
    /// # Errors
    /// If that one is gone.
    pub(crate) fn tell(&mut self, event: Event) -> Result<()> {
        if self.circle.rank().0 == 0 { (self.sink)(event) } else { Ok(()) }
    }

    /// Measures and checks shards of so many elements; `index` counts the sizes. Collective.
    ///
    /// # Errors
    /// If the operation fails, or a byte is wrong on any rank.
    pub(crate) fn size<T: Element>(&mut self, index: usize, shard_length: u64) -> Result<()> {
        let total_bytes = self.total_bytes(shard_length);
        let doing = |activity| Event::Doing { activity, total_bytes };
        let limit = if self.limit.is_some() {
            self.tell(doing(Activity::Limit))?;
            self.measure_limit(shard_length)?
        } else {
            None
        };
        let mut entrants = self.entrants::<T>(shard_length)?;
        let data = |round| Data { seed: self.seed, size: index as u64, round };
        let (before, after) = (data(0), data(1));
        self.tell(doing(Activity::Check))?;
        self.check(&mut entrants, shard_length, before)?;
        self.tell(doing(Activity::Measure))?;
        let timings = self.time(&mut entrants)?;
        self.tell(doing(Activity::Check))?;
        self.check(&mut entrants, shard_length, after)?;
        for (gather, timing) in entrants.iter().zip(timings) {
            let report = gather.report();
            if let Some(text) = self.setup.explanation(report) {
                self.tell(Event::Note { text })?;
            }
            let row = self.row(gather, timing, limit);
            self.tell(Event::Row { row: Box::new(row) })?;
        }
        drop(entrants);
        // The next size is allocated when the memory of this one is free on every rank.
        Ok(self.group.barrier()?)
    }

    /// Traces a start at shards of so many elements. Collective.
    ///
    /// # Errors
    /// If it fails.
    pub(crate) fn trace<T: Element>(&mut self, shard_length: u64) -> Result<()> {
        let total_bytes = self.total_bytes(shard_length);
        self.tell(Event::Doing { activity: Activity::Trace, total_bytes })?;
        let Self { setup, circle, group, .. } = self;
        let starts = timeline::trace::<F, T>(setup, circle, group, shard_length)?;
        self.tell(Event::Trace { starts })
    }

    fn total_bytes(&self, shard_length: u64) -> u64 {
        self.setup.shard_bytes(shard_length).iter().sum()
    }

    fn measure_limit(&mut self, shard_length: u64) -> Result<Option<Duration>> {
        let (total_bytes, rank) = (self.total_bytes(shard_length), self.circle.rank());
        let Self { setup, pace, circle, group, limit, .. } = self;
        let Some(limit) = limit else { return Ok(None) };
        let (own_offset, shard_bytes) = setup.own_bytes(shard_length, rank);
        let in_place = setup.options.in_place;
        let copies = Copies { own_offset, shard_bytes, total_bytes, in_place };
        limit.measure(copies, *pace, circle, group).map(Some)
    }

    fn entrants<T: Element>(&mut self, shard_length: u64) -> Result<Vec<AllGather<T>>> {
        let Self { setup, group, .. } = self;
        let entrant = |algorithm| {
            let way = Way { algorithm, captured: false, traced: false };
            setup.prepare::<F, T>(group, shard_length, way)
        };
        setup.algorithms().into_iter().map(entrant).collect()
    }

    fn time<T: Element>(&mut self, entrants: &mut [AllGather<T>]) -> Result<Vec<Timing>> {
        let Self { pace, circle, group, .. } = self;
        let mut runs: Vec<_> = entrants.iter_mut().map(|gather| || Ok(gather.run()?)).collect();
        let mut operations: Vec<&mut dyn FnMut() -> Result<()>> =
            runs.iter_mut().map(|run| run as _).collect();
        pace.time(circle, group, longest_of_each, &mut operations)
    }

    /// Gathers fresh data into poisoned outputs, compares every byte, and learns whether all other
    /// ranks found theirs right.
    fn check<T: Element>(
        &mut self,
        entrants: &mut [AllGather<T>],
        shard_length: u64,
        data: Data,
    ) -> Result<()> {
        let rank = self.circle.rank();
        for gather in entrants {
            let mut found: Found = Ok(());
            // Of two outputs in turn the next start fills the other one: after the last of these
            // starts every output has been poisoned, filled and compared.
            for _ in 0..gather.report().outputs {
                content::fill(&self.setup, gather, rank, data)?;
                gather.run()?;
                found =
                    found.and(content::compare(&self.setup, gather, (rank, shard_length), data)?);
            }
            let texts = self.circle.share("check", &found.err().map(|wrong| wrong.to_string()))?;
            let wrong = texts.into_iter().enumerate().find_map(|(rank, text)| Some((rank, text?)));
            if let Some((rank, text)) = wrong {
                let algorithm = gather.report().algorithm;
                let text = format!("{algorithm}: wrong data in the output of rank {rank}: {text}");
                return Err(Failure::failed(text).with_advice(
                    "this is a fault in Peerlane or in the hardware: please report it",
                ));
            }
        }
        Ok(())
    }

    fn row<T: Element>(
        &self,
        gather: &AllGather<T>,
        Timing { statistics, iterations }: Timing,
        limit: Option<Duration>,
    ) -> Row {
        let (setup, report) = (&self.setup, gather.report());
        let predicted = setup.predicted(report);
        figures::row(setup, report, Figures { statistics, iterations, limit, predicted })
    }
}
