//! Messaging over posted-write links.
