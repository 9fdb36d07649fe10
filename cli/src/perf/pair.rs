//! Connects the two ranks of a measurement with a group, and channels over a window.

use peerlane::bootstrap::Bootstrap;
use peerlane::hal::Fabric;
use peerlane::{Channel, Deadline, DynFabric, Error, Group, GroupOptions, Rank, Window};

use super::options::{Options, PerfTest};
use super::report::PerfRow;
use crate::error::{Failure, Result};
use crate::ranks::comm::Comm;
use crate::ranks::data::{TestData, overwrite};

/// The alignment of buffers in bytes, a page as in perftest.
const ALIGN_BYTES: u64 = 4096;

/// One of the two ranks of a measurement with its connection to the other rank.
pub(super) struct Pair<'a> {
    pub(super) options: &'a Options,
    group: Group,
    comm: Comm,
    seed: u64,
    sizes: u64,
}

/// The channels that measure one message size. Each has an engine, a send buffer and a receive buffer of its own.
pub(super) struct Channels {
    pub(super) all: Vec<Channel<u8>>,
    window: Window<u8>,
    peer: Rank,
    bytes: usize,
    slot_bytes: usize,
    data: TestData,
}

impl<'a> Pair<'a> {
    pub(super) fn open(
        options: &'a Options,
        comm: Comm,
        fabric: DynFabric,
        seed: u64,
    ) -> Result<Self> {
        let group = GroupOptions::default().timeout(comm.timeout()).open(comm.clone(), fabric)?;
        Ok(Self { options, group, comm, seed, sizes: 0 })
    }

    /// Returns whether this rank measures, while the other rank answers.
    pub(super) fn is_measuring(&self) -> bool {
        self.comm.rank().0 == 0
    }

    /// Opens channels for messages of a size, fills the buffers that are sent with test data, and overwrites the
    /// others with a known byte. Collective.
    pub(super) fn channels(&mut self, bytes: u64) -> Result<Channels> {
        let count = usize::from(self.options.engines);
        let slot_bytes = bytes.max(1).checked_next_multiple_of(ALIGN_BYTES);
        let slot_bytes = slot_bytes.and_then(|bytes| usize::try_from(bytes).ok());
        let window_bytes = slot_bytes.and_then(|bytes| bytes.checked_mul(2 * count));
        let (Some(slot_bytes), Some(window_bytes)) = (slot_bytes, window_bytes) else {
            return Err(Failure::usage(format!(
                "--bytes {bytes} with {count} engines needs more memory than can be addressed"
            )));
        };
        let window = self.group.window::<u8>(window_bytes)?;
        let all = (0..count).map(|_| self.group.channel(&window, 1));
        let mut all = all.collect::<std::result::Result<Vec<_>, _>>()?;
        let data = TestData { seed: self.seed, size: self.sizes, round: 0 };
        self.sizes += 1;
        let (rank, bytes) = (self.comm.rank().index(), bytes as usize);
        let mut message = vec![0; bytes];
        for (index, channel) in all.iter_mut().enumerate() {
            data.fill(rank * count + index, &mut message);
            channel.write(index * slot_bytes, &message)?;
            overwrite(&mut message);
            channel.write((count + index) * slot_bytes, &message)?;
        }
        // The peer writes to these buffers.
        self.group.barrier()?;
        Ok(Channels { all, window, peer: Rank::at(1 - rank), bytes, slot_bytes, data })
    }

    pub(super) fn deadline(&self) -> Deadline {
        self.comm.deadline()
    }

    /// Compares the received data, and frees the buffers. Collective.
    pub(super) fn finish(&mut self, channels: Channels, work: PerfTest) -> Result<()> {
        let found = channels.check(work, self.comm.rank())?;
        if let Some((rank, text)) = self.comm.first_fault(found.err())? {
            let work = work.name();
            let text = format!("{work}: wrong data at rank {rank}: {text}");
            return Err(Failure::failed(text)
                .with_advice("this is a bug in Peerlane or a hardware fault: please report it"));
        }
        let Channels { all, window, .. } = channels;
        drop(all);
        Ok(self.group.release(window).map_err(Error::from)?)
    }

    pub(super) fn row(&self, work: PerfTest, bytes: u64) -> PerfRow {
        let backend = self.group.fabric().backend().to_string();
        PerfRow::new(work, backend, bytes, self.options)
    }

    pub(super) fn close(self) -> Result<()> {
        Ok(self.group.close()?)
    }
}

impl Channels {
    /// Puts or gets the message of a channel.
    pub(super) fn send(&mut self, index: usize, work: PerfTest) -> Result<()> {
        let (from, to) = (index * self.slot_bytes, (self.all.len() + index) * self.slot_bytes);
        let (channel, peer, bytes) = (&mut self.all[index], self.peer, self.bytes);
        match work {
            PerfTest::Put => channel.put(peer, from..from + bytes, to),
            PerfTest::Get => channel.get(peer, from, to..to + bytes),
            PerfTest::Signal if bytes == 0 => channel.signal(peer, 0),
            PerfTest::Signal => channel.put_signal(peer, from..from + bytes, to, 0),
        }?;
        Ok(())
    }

    /// Signals the peer that a channel has finished, and waits until the signal is complete.
    pub(super) fn signal_done(&mut self, index: usize, deadline: Deadline) -> Result<()> {
        self.all[index].signal(self.peer, 0)?;
        Ok(self.all[index].flush(deadline.remaining())?)
    }

    /// Waits for the next signal of the peer on a channel.
    pub(super) fn wait(&mut self, index: usize, deadline: Deadline) -> Result<()> {
        self.all[index].wait(self.peer, 0, deadline.remaining())?;
        Ok(())
    }

    fn check(&self, work: PerfTest, rank: Rank) -> Result<std::result::Result<(), String>> {
        let count = self.all.len();
        let (receives, checked) = match work {
            PerfTest::Put => (rank.0 == 1, count),
            PerfTest::Get => (rank.0 == 0, count),
            PerfTest::Signal => (true, 1),
        };
        let mut seen = vec![0; self.bytes];
        for (index, channel) in self.all.iter().enumerate().take(if receives { checked } else { 0 })
        {
            channel.read((count + index) * self.slot_bytes, &mut seen)?;
            let block = self.peer.index() * count + index;
            if let Err(wrong) = self.data.check(block, &seen) {
                return Ok(Err(wrong.to_string()));
            }
        }
        Ok(Ok(()))
    }
}
