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
pub(crate) struct Extent {
    pub(crate) window: u64,
    pub(crate) bytes: Range<u64>,
    pub(crate) writes: bool,
}

impl Extent {
    pub(crate) fn conflicts(&self, other: &Self) -> bool {
        let overlap = self.bytes.start.max(other.bytes.start) < self.bytes.end.min(other.bytes.end);
        self.window == other.window && overlap && (self.writes || other.writes)
    }
}

type ActivityOf = Box<dyn Fn() -> Activity + Send>;

#[derive(Default)]
pub(crate) struct WindowUses(Mutex<State>);

#[derive(Default)]
struct State {
    users: Vec<User>,
    next: u64,
}

struct User {
    number: u64,
    name: String,
    extents: Vec<Extent>,
    activity: Option<ActivityOf>,
    begun: Option<Activity>,
}

pub(crate) struct BegunStart<'a>(&'a WindowUse);

pub(crate) struct WindowUse {
    users: Arc<WindowUses>,
    number: u64,
}

impl WindowUses {
    pub(crate) fn enter(
        self: &Arc<Self>,
        name: String,
        extents: Vec<Extent>,
        activity: impl Fn() -> Activity + Send + 'static,
    ) -> WindowUse {
        self.add(&mut self.state(), name, extents, Some(Box::new(activity)))
    }

    pub(crate) fn borrow(self: &Arc<Self>, extent: Extent) -> Result<WindowUse, Error> {
        let mut state = self.state();
        state.check(None, std::slice::from_ref(&extent), false)?;
        Ok(self.add(&mut state, "the host".to_owned(), vec![extent], None))
    }

    fn add(
        self: &Arc<Self>,
        state: &mut State,
        name: String,
        extents: Vec<Extent>,
        activity: Option<ActivityOf>,
    ) -> WindowUse {
        let number = state.next;
        state.next += 1;
        state.users.push(User { number, name, extents, activity, begun: None });
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
    pub(crate) fn set_extents(&self, extents: [Option<Extent>; 2]) {
        let mut state = self.users.state();
        let own = state.users.iter_mut().find(|user| user.number == self.number);
        let Some(own) = own else { return };
        let is_idle = own.activity.as_ref().is_none_or(|of| of() == Activity::Idle);
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
    pub(crate) fn begin(&self, on_stream: bool) -> Result<BegunStart<'_>, Error> {
        let mut state = self.users.state();
        let own = state.users.iter().find(|user| user.number == self.number);
        let extents = own.map(|user| &user.extents[..]).unwrap_or_default();
        state.check(Some(self.number), extents, on_stream)?;
        let activity = if on_stream { Activity::OnStream } else { Activity::Open };
        state.set_begun(self.number, Some(activity));
        Ok(BegunStart(self))
    }
}

impl Drop for BegunStart<'_> {
    fn drop(&mut self) {
        self.0.users.state().set_begun(self.0.number, None);
    }
}

impl Drop for WindowUse {
    fn drop(&mut self) {
        self.users.state().users.retain(|user| user.number != self.number);
    }
}

impl State {
    fn set_begun(&mut self, number: u64, begun: Option<Activity>) {
        let own = self.users.iter_mut().find(|user| user.number == number);
        own.into_iter().for_each(|user| user.begun = begun);
    }

    fn check(&self, own: Option<u64>, wanted: &[Extent], on_stream: bool) -> Result<(), Error> {
        for user in self.users.iter().filter(|user| Some(user.number) != own) {
            let conflicts = |extent: &&Extent| wanted.iter().any(|own| own.conflicts(extent));
            let Some(extent) = user.extents.iter().find(conflicts) else { continue };
            let activity = user.activity.as_ref().map(|of| user.begun.unwrap_or_else(of));
            let does = match activity {
                Some(Activity::Idle) => continue,
                // What a start and messages do to the same bytes is ordered by the caller.
                Some(Activity::Channel) if own.is_some() => continue,
                Some(Activity::Channel) => {
                    "can write them at any time; use its `write` and `read`, or drop it first"
                }
                Some(Activity::OnStream | Activity::Captured) if on_stream => continue,
                None => "borrows them as a slice; drop that slice first",
                Some(Activity::Open | Activity::OnStream) => {
                    "uses them in a start that is not complete; wait for that start first"
                }
                Some(Activity::Captured) => {
                    "uses them in a graph, whose replays are not tracked; use them on the stream \
                     of the graph"
                }
            };
            let (name, Extent { window, bytes, .. }) = (&user.name, extent);
            let text = format!(
                "bytes {} to {} of window {window} are in use: {name} {does}",
                bytes.start, bytes.end
            );
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        Ok(())
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
            users.enter(name.to_owned(), vec![extent(1, bytes, true)], move || {
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
        assert_snapshot!(said(second.begin(false)), @"bytes 0 to 8 of window 1 are in use: all-gather 1 uses them in a start that is not complete; wait for that start first");
        assert_snapshot!(said(borrow(7..9)), @"bytes 0 to 8 of window 1 are in use: all-gather 1 uses them in a start that is not complete; wait for that start first");
        assert_eq!(said(borrow(8..9)), "ok");
        *one.lock().unwrap() = Activity::OnStream;
        assert_eq!(said(second.begin(true)), "ok");
        assert!(second.begin(false).is_err() && borrow(7..9).is_err());
        *one.lock().unwrap() = Activity::Captured;
        assert_snapshot!(said(borrow(0..2)), @"bytes 0 to 8 of window 1 are in use: all-gather 1 uses them in a graph, whose replays are not tracked; use them on the stream of the graph");
        drop(first);
        assert_eq!(said(borrow(7..9)), "ok");
    }
}
