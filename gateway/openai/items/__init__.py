"""`/v1/responses`: its requests as chats, and what a chat's completion is as items and events."""
