//! Ends channels on all ranks, so that their windows can be borrowed again.

use std::sync::Arc;

use peerlane_hal::{Deadline, Rank};

use super::{Channel, ChannelEvent, Mode, invalid};
use crate::element::Element;
use crate::error::Error;
use crate::group::Group;
use crate::group::agreement::{Offer, agree};

impl Group {
    /// Ends a channel on every rank. Collective.
    ///
    /// When it returns, all messages of all ranks have arrived, and no rank can send another one.
    /// So the host may borrow [slices](crate::group::Window::slice) of the window again, unless
    /// another channel uses it.
    ///
    /// ```
    /// # use peerlane::bootstrap::{Bootstrap, in_process};
    /// # use peerlane::{Group, Rank, host};
    /// # in_process::run(2, |bootstrap| {
    /// # let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
    /// # let mut group = Group::open(bootstrap, fabric)?;
    /// let window = group.window::<u32>(2)?;
    /// let mut channel = group.channel(&window, 1)?;
    /// channel.write(0, &[group.rank().0 + 7])?;
    /// channel.put(Rank(1 - group.rank().0), 0..1, 1)?;
    /// assert!(window.slice(0..2).is_err());
    /// group.close_channel(channel)?;
    /// assert_eq!(window.slice(0..2)?[1], 8 - group.rank().0);
    /// # group.close()
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    /// [`Timeout`](peerlane_hal::ErrorKind::Timeout) if messages of this rank are not complete
    /// within the timeout of the group, or a peer does not end the channel;
    /// [`InvalidArgument`](peerlane_hal::ErrorKind::InvalidArgument) if the channel belongs to
    /// another group; the reason why the group has ended. After an error the window stays closed to
    /// slices.
    pub fn close_channel<T: Element>(&mut self, mut channel: Channel<T>) -> Result<(), Error> {
        let timeout = self.timeout();
        let deadline = Deadline::after(timeout);

        // Messages on streams do not order those of the host, so they are complete before the last
        // signals are sent.
        let complete = match Arc::ptr_eq(&channel.runtime, &self.runtime) {
            true => channel.flush(timeout),
            false => Err(invalid(format!(
                "{} belongs to another group; end it with that group",
                channel.name
            ))),
        };

        let label = format!("close {}", channel.name);
        agree(&self.runtime, &label, complete.map(|()| Offer::default()), deadline)?;

        // A complete message may not have arrived yet. A signal is given after all earlier
        // messages, so a peer that has waited for it has received them.
        let end = channel.end_signal();
        for peer in Rank::all(channel.tiers.len()) {
            channel.submit_signal(peer, end, None, Mode::Host)?;
        }
        for peer in Rank::all(channel.tiers.len()) {
            let event = ChannelEvent::Signal { peer, signal: end, count: 1 };
            channel.wait_for_event(event, || deadline)?;
        }
        channel.flush(deadline.remaining())?;

        if let Some(used) = channel.used.take() {
            used.end();
        }
        Ok(())
    }
}
