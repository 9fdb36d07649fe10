//! Refuses an operation or a borrow if it conflicts with another one on the same bytes of a window.
//!
//! Several operations run over one window, and the host accesses it between their starts. The borrow checker cannot see
//! overlaps; this table checks them at run time, as `RefCell` does.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use peerlane_hal::ErrorKind;

use crate::error::Error;
use crate::group::tracker::Activity;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::group) struct Extent {
    pub(in crate::group) window: u64,
    pub(in crate::group) bytes: Range<u64>,
    pub(in crate::group) writes: bool,
}

impl Extent {
    /// Returns whether the two conflict if one of them may be anywhere in its window.
    fn conflicts_anywhere(&self, other: &Self) -> bool {
        let is_empty = self.bytes.is_empty() || other.bytes.is_empty();
        self.window == other.window && !is_empty && (self.writes || other.writes)
    }

    pub(in crate::group) fn conflicts(&self, other: &Self) -> bool {
        let overlap = self.bytes.start.max(other.bytes.start) < self.bytes.end.min(other.bytes.end);
        self.window == other.window && overlap && (self.writes || other.writes)
    }
}

type ActivityOf = Box<dyn Fn() -> Activity + Send>;

/// The operations, channels and slices that use the windows of a group on this rank.
#[derive(Default)]
pub(in crate::group) struct WindowUses(Mutex<State>);

#[derive(Default)]
struct State {
    users: Vec<User>,
    next: u64,
}

struct User {
    number: u64,
    name: String,
    extents: Vec<Extent>,
    access: Access,
}

/// When a user reads or writes its extents.
enum Access {
    /// The host holds a slice of them.
    Slice,
    /// Starts of an operation do while they are open. `begun` overrides `activity` while a start begins.
    ///
    /// If the operation is resizable, a peer that has made a start with other lengths or places, by mistake, accesses any bytes
    /// of the window until the ranks notice it. So no slice of the window is held meanwhile.
    Starts { activity: ActivityOf, begun: Option<Activity>, resizable: bool },
    /// Messages of peers do at any time.
    Messages(ChannelState),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum ChannelState {
    /// No rank has the channel: it is not open yet, or all ranks have closed it.
    Closed,
    Open,
    /// This rank has dropped the channel, but peers may still send messages.
    Dropped,
}

/// Who asks whether bytes are in use.
enum Asking {
    Slice,
    Start { number: u64, on_stream: bool, resizable: bool },
    Channel,
}

pub(in crate::group) struct BegunStart<'a>(&'a WindowUse);

pub(in crate::group) struct WindowUse {
    users: Arc<WindowUses>,
    number: u64,
}

impl WindowUses {
    /// Adds an operation, whose starts use the extents.
    pub(in crate::group) fn add_operation(
        self: &Arc<Self>,
        name: String,
        extents: Vec<Extent>,
        resizable: bool,
        activity: impl Fn() -> Activity + Send + 'static,
    ) -> WindowUse {
        let access = Access::Starts { activity: Box::new(activity), begun: None, resizable };
        self.add(&mut self.state(), name, extents, access)
    }

    /// Adds a channel, whose messages use the extent at any time. [`WindowUse::set_open`] follows when it is open.
    ///
    /// # Errors
    /// If the host holds a slice of the extent.
    pub(in crate::group) fn add_channel(
        self: &Arc<Self>,
        name: String,
        extent: Extent,
    ) -> Result<WindowUse, Error> {
        let mut state = self.state();
        state.check(&Asking::Channel, std::slice::from_ref(&extent))?;
        let access = Access::Messages(ChannelState::Closed);
        Ok(self.add(&mut state, name, vec![extent], access))
    }

    /// Adds a slice that the host holds.
    ///
    /// # Errors
    /// If an open start or a channel uses its bytes, or another slice does and one of the two writes.
    pub(in crate::group) fn borrow(self: &Arc<Self>, extent: Extent) -> Result<WindowUse, Error> {
        let mut state = self.state();
        state.check(&Asking::Slice, std::slice::from_ref(&extent))?;
        Ok(self.add(&mut state, "the host".to_owned(), vec![extent], Access::Slice))
    }

    /// Removes the channels over a window that no rank has any more.
    pub(in crate::group) fn remove_window(&self, window: u64) {
        self.state().users.retain(|user| user.extents.iter().all(|extent| extent.window != window));
    }

    fn add(
        self: &Arc<Self>,
        state: &mut State,
        name: String,
        extents: Vec<Extent>,
        access: Access,
    ) -> WindowUse {
        let number = state.next;
        state.next += 1;
        state.users.push(User { number, name, extents, access });
        WindowUse { users: Arc::clone(self), number }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Every change is whole before anything can panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WindowUse {
    /// Sets the bytes that the next starts use: those of the input and of the output, of the windows that were given first. While an
    /// earlier start is open, all bytes between its bytes and the new ones count as used.
    pub(in crate::group) fn set_extents(&self, extents: [Option<Extent>; 2]) {
        let mut state = self.users.state();
        let Some(own) = state.user_mut(self.number) else { return };
        let is_idle = match &own.access {
            Access::Starts { activity, .. } => activity() == Activity::Idle,
            Access::Slice | Access::Messages(_) => true,
        };

        for (old, new) in own.extents.iter_mut().zip(extents.into_iter().flatten()) {
            *old = match is_idle {
                true => new,
                false => {
                    let bytes =
                        old.bytes.start.min(new.bytes.start)..old.bytes.end.max(new.bytes.end);
                    Extent { bytes, ..new }
                }
            };
        }
    }

    /// Starts on streams do not conflict, because the streams order them.
    pub(in crate::group) fn begin(&self, on_stream: bool) -> Result<BegunStart<'_>, Error> {
        let mut state = self.users.state();
        let own = state.users.iter().find(|user| user.number == self.number);
        let extents = own.map(|user| &user.extents[..]).unwrap_or_default();
        let resizable = own.is_some_and(User::is_resizable);
        state.check(&Asking::Start { number: self.number, on_stream, resizable }, extents)?;
        let activity = if on_stream { Activity::OnStream } else { Activity::Open };
        state.set_begun(self.number, Some(activity));
        Ok(BegunStart(self))
    }

    /// Notes that the channel is open on every rank. From now on, dropping this value does not end the use.
    pub(in crate::group) fn set_open(&self) {
        self.users.state().set_channel(self.number, ChannelState::Open);
    }

    /// Ends the use of a channel, because no rank sends messages through it any more.
    pub(in crate::group) fn end(self) {
        // A closed channel is removed when its use is dropped.
        self.users.state().set_channel(self.number, ChannelState::Closed);
    }
}

impl Drop for BegunStart<'_> {
    fn drop(&mut self) {
        self.0.users.state().set_begun(self.0.number, None);
    }
}

impl Drop for WindowUse {
    fn drop(&mut self) {
        let mut state = self.users.state();
        match state.user_mut(self.number).map(|user| &mut user.access) {
            // Only this rank has dropped the channel, so peers may still write through theirs.
            Some(Access::Messages(channel)) if *channel == ChannelState::Open => {
                *channel = ChannelState::Dropped;
            }
            Some(Access::Starts { activity, .. }) if activity() == Activity::Abandoned => {}
            _ => state.users.retain(|user| user.number != self.number),
        }
    }
}

impl State {
    fn user_mut(&mut self, number: u64) -> Option<&mut User> {
        self.users.iter_mut().find(|user| user.number == number)
    }

    fn set_begun(&mut self, number: u64, now: Option<Activity>) {
        if let Some(Access::Starts { begun, .. }) =
            self.user_mut(number).map(|user| &mut user.access)
        {
            *begun = now;
        }
    }

    fn set_channel(&mut self, number: u64, now: ChannelState) {
        if let Some(Access::Messages(channel)) = self.user_mut(number).map(|user| &mut user.access)
        {
            *channel = now;
        }
    }

    /// Refuses the bytes `wanted` if another user uses some of them now, and the two are not ordered.
    fn check(&self, asking: &Asking, wanted: &[Extent]) -> Result<(), Error> {
        for user in &self.users {
            let conflicts = match user.is_anywhere_for(asking) {
                true => Extent::conflicts_anywhere,
                false => Extent::conflicts,
            };
            let is_met = |extent: &&Extent| wanted.iter().any(|own| conflicts(own, extent));
            let Some(extent) = user.extents.iter().find(is_met) else { continue };
            let Some(does) = user.conflict_with(asking) else { continue };

            let (name, Extent { window, bytes, .. }) = (&user.name, extent);
            let mut text = format!(
                "bytes {} to {} of window {window} are in use: {name} {does}",
                bytes.start, bytes.end
            );
            if !wanted.iter().any(|own| own.conflicts(extent)) {
                text.push_str(
                    "; a start of a resizable operation excludes all slices of its window, because a rank that resizes it \
                     differently uses other bytes",
                );
            }
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        Ok(())
    }
}

impl User {
    fn is_resizable(&self) -> bool {
        matches!(self.access, Access::Starts { resizable: true, .. })
    }

    /// Returns whether one of the two is a slice, and the other one may be anywhere in the window.
    fn is_anywhere_for(&self, asking: &Asking) -> bool {
        match asking {
            Asking::Slice => self.is_resizable(),
            Asking::Start { resizable, .. } => *resizable && matches!(self.access, Access::Slice),
            Asking::Channel => false,
        }
    }

    /// Returns what this user does with bytes that the other one asks for, and what to do about it; `None` if both may use them.
    fn conflict_with(&self, asking: &Asking) -> Option<&'static str> {
        let activity = match (&self.access, asking) {
            (Access::Slice, _) => return Some("borrows them as a slice; drop that slice first"),
            (Access::Messages(channel), Asking::Slice) => {
                return Some(match channel {
                    ChannelState::Closed | ChannelState::Open => {
                        "can write them at any time; use its `write` and `read`, or end it with \
                         `Group::close_channel` first"
                    }
                    ChannelState::Dropped => {
                        "was dropped on this rank, but peers may still write them; end a channel on \
                         all ranks with `Group::close_channel`"
                    }
                });
            }
            // The caller orders messages with each other and with starts. Nothing borrows the bytes.
            (Access::Messages(_), Asking::Start { .. } | Asking::Channel)
            | (Access::Starts { .. }, Asking::Channel) => return None,
            (Access::Starts { .. }, Asking::Start { number, .. }) if self.number == *number => {
                return None;
            }
            (Access::Starts { activity, begun, .. }, _) => begun.unwrap_or_else(activity),
        };

        let on_stream = matches!(asking, Asking::Start { on_stream: true, .. });
        match activity {
            Activity::Idle => None,
            Activity::OnStream | Activity::Captured if on_stream => None,
            Activity::Open | Activity::OnStream => {
                Some("uses them in a start that this rank has not waited for; wait for it first")
            }
            Activity::Abandoned => Some(
                "was dropped during a start, in which peers still use them; only the end of the group ends it",
            ),
            Activity::Captured => Some(
                "uses them in a graph, whose replays are not tracked; use them on the stream of the \
                 graph",
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::*;

    fn extent(window: u64, bytes: Range<u64>, writes: bool) -> Extent {
        Extent { window, bytes, writes }
    }

    fn said<T>(result: Result<T, Error>) -> String {
        result.err().map_or_else(|| "ok".to_owned(), |error| error.to_string())
    }

    #[test]
    fn borrows_may_overlap_if_none_writes() {
        let users = Arc::new(WindowUses::default());
        let borrow = |bytes, writes| users.borrow(extent(1, bytes, writes));
        let _first = borrow(0..8, false).unwrap();
        let second = borrow(4..12, false).unwrap();
        assert_snapshot!(said(borrow(11..20, true)), @"bytes 4 to 12 of window 1 are in use: the host borrows them as a slice; drop that slice first");
        let _beside = borrow(12..20, true).unwrap();
        drop(second);
        let _again = borrow(8..12, true).unwrap();
        users.borrow(extent(2, 0..20, true)).unwrap();
        borrow(5..5, true).unwrap();
    }

    #[test]
    fn starts_and_borrows_exclude_each_other() {
        let users = Arc::new(WindowUses::default());
        let one = Arc::new(Mutex::new(Activity::Idle));
        let two = Arc::new(Mutex::new(Activity::Idle));
        let enter = |name: &str, bytes, activity: &Arc<Mutex<Activity>>| {
            let activity = Arc::clone(activity);
            users.add_operation(name.to_owned(), vec![extent(1, bytes, true)], false, move || {
                *activity.lock().unwrap()
            })
        };
        let (first, second) =
            (enter("all-gather 1", 0..8, &one), enter("all-gather 2", 4..12, &two));
        let borrow = |bytes| users.borrow(extent(1, bytes, false));
        let held = borrow(0..1).unwrap();
        assert_eq!(said(second.begin(false)), "ok");
        assert_snapshot!(said(first.begin(false)), @"bytes 0 to 1 of window 1 are in use: the host borrows them as a slice; drop that slice first");
        assert_snapshot!(said(first.begin(true)), @"bytes 0 to 1 of window 1 are in use: the host borrows them as a slice; drop that slice first");
        drop(held);
        let begun = first.begin(false).unwrap();
        assert!(second.begin(false).is_err() && borrow(0..1).is_err());
        drop(begun);
        *one.lock().unwrap() = Activity::Open;
        assert_eq!(said(first.begin(false)), "ok");
        assert_snapshot!(said(second.begin(false)), @"bytes 0 to 8 of window 1 are in use: all-gather 1 uses them in a start that this rank has not waited for; wait for it first");
        assert_snapshot!(said(borrow(7..9)), @"bytes 0 to 8 of window 1 are in use: all-gather 1 uses them in a start that this rank has not waited for; wait for it first");
        assert_eq!(said(borrow(8..9)), "ok");
        *one.lock().unwrap() = Activity::OnStream;
        assert_eq!(said(second.begin(true)), "ok");
        assert!(second.begin(false).is_err() && borrow(7..9).is_err());
        *one.lock().unwrap() = Activity::Captured;
        assert_snapshot!(said(borrow(0..2)), @"bytes 0 to 8 of window 1 are in use: all-gather 1 uses them in a graph, whose replays are not tracked; use them on the stream of the graph");
        drop(first);
        assert_eq!(said(borrow(7..9)), "ok");
    }

    #[test]
    fn a_channel_keeps_slices_away_until_it_ends_on_every_rank() {
        let users = Arc::new(WindowUses::default());
        let borrow = |window| users.borrow(extent(window, 4..8, false));
        let add = |name: &str| users.add_channel(name.to_owned(), extent(1, 0..64, true));

        let held = borrow(1).unwrap();
        assert_snapshot!(said(add("channel 1")), @"bytes 4 to 8 of window 1 are in use: the host borrows them as a slice; drop that slice first");
        assert_eq!(said(users.add_channel("channel 1".to_owned(), extent(2, 0..64, true))), "ok");
        drop(held);

        // Another rank has refused the channel.
        drop(add("channel 2").unwrap());
        assert_eq!(said(borrow(1)), "ok");

        let channel = add("channel 3").unwrap();
        channel.set_open();
        assert_snapshot!(said(borrow(1)), @"bytes 0 to 64 of window 1 are in use: channel 3 can write them at any time; use its `write` and `read`, or end it with `Group::close_channel` first");
        let other = add("channel 4").unwrap();
        other.set_open();
        channel.end();
        assert!(borrow(1).is_err());
        drop(other);
        assert_snapshot!(said(borrow(1)), @"bytes 0 to 64 of window 1 are in use: channel 4 was dropped on this rank, but peers may still write them; end a channel on all ranks with `Group::close_channel`");

        let start = users.add_operation(
            "all-gather 1".to_owned(),
            vec![extent(1, 0..8, true)],
            false,
            || Activity::Idle,
        );
        assert_eq!(said(start.begin(false)), "ok");
        users.remove_window(1);
        assert_eq!(said(borrow(1)), "ok");
    }

    #[test]
    fn an_operation_that_is_dropped_during_a_start_keeps_its_bytes() {
        let users = Arc::new(WindowUses::default());
        let add = |activity: Activity| {
            users.add_operation(
                "all-gather 1".to_owned(),
                vec![extent(1, 0..8, true)],
                false,
                move || activity,
            )
        };
        for activity in [Activity::Idle, Activity::Open, Activity::Captured] {
            drop(add(activity));
            assert_eq!(said(users.borrow(extent(1, 0..8, false))), "ok", "{activity:?}");
        }
        drop(add(Activity::Abandoned));
        assert_snapshot!(said(users.borrow(extent(1, 0..8, false))), @"bytes 0 to 8 of window 1 are in use: all-gather 1 was dropped during a start, in which peers still use them; only the end of the group ends it");
    }

    #[test]
    fn a_start_that_ranks_may_size_differently_excludes_slices_of_its_whole_window() {
        let users = Arc::new(WindowUses::default());
        let activity = Arc::new(Mutex::new(Activity::Idle));
        let shared = Arc::clone(&activity);
        let add = |resizable, shared: Arc<Mutex<Activity>>| {
            users.add_operation(
                "all-gather 1".to_owned(),
                vec![extent(1, 0..8, true)],
                resizable,
                move || *shared.lock().unwrap(),
            )
        };
        let resizable = add(true, shared);
        let slice = users.borrow(extent(1, 40..44, true)).unwrap();
        assert_snapshot!(said(resizable.begin(false)), @"bytes 40 to 44 of window 1 are in use: the host borrows them as a slice; drop that slice first; a start of a resizable operation excludes all slices of its window, because a rank that resizes it differently uses other bytes");
        drop(slice);
        let elsewhere = users.borrow(extent(2, 0..44, true)).unwrap();
        assert_eq!(said(resizable.begin(false)), "ok");
        *activity.lock().unwrap() = Activity::Open;
        assert_snapshot!(said(users.borrow(extent(1, 40..44, false))), @"bytes 0 to 8 of window 1 are in use: all-gather 1 uses them in a start that this rank has not waited for; wait for it first; a start of a resizable operation excludes all slices of its window, because a rank that resizes it differently uses other bytes");
        drop(elsewhere);

        let other = add(false, Arc::default());
        assert_eq!(said(users.borrow(extent(2, 40..44, false))), "ok");
        assert!(other.begin(false).is_err(), "starts of both operations use bytes 0 to 8");
    }
}
